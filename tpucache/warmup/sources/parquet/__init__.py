"""Samples in parquet files, as Hugging Face and pandas write them."""
