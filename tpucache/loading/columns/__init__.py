"""Columns of the samples table beside the records."""
