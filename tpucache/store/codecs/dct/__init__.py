"""Codecs of JPEG's coefficients: quantise, leave out the zeros, compress; a device makes pixels of them."""
