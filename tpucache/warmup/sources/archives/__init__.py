"""Samples inside .zip and .tar files, which are read where they are: nothing is unpacked to disk."""
