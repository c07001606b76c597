"""Misuse and damage: each row ends in the right data or in a clear refusal."""
