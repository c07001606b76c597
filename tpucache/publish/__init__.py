"""Brings a cache to where notebooks find it: a Kaggle Dataset, or any store that fsspec knows."""
