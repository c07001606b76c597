"""Samples in TFRecord files."""
