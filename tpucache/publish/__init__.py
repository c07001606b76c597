"""A cache goes out to where notebooks find it: a Kaggle Dataset, or any store that fsspec knows."""
