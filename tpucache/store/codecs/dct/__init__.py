"""Codecs that store JPEG's coefficients: quantise, leave out the zeros, compress. A device computes the pixels."""
