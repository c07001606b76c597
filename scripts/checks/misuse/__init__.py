"""Misuse and damage: every row ends in the right data or in a clear refusal. See `python -m scripts.checks.misuse -h`."""
