"""Brings a cache to where notebooks find it: a Kaggle dataset, or any URL."""
