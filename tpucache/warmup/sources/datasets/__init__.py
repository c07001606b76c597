"""Samples of datasets in Python: images, arrays, and sequences of different lengths."""
