"""Batches mixed of the samples of several caches, by shares."""
