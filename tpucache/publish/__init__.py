"""Publish caches as Kaggle datasets, and copy caches to and from URLs."""
