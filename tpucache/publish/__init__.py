"""Publishes caches as Kaggle datasets, and copies them to and from URLs."""
