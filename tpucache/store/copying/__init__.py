"""Copies of a cache: which folders may be written, and what may take the place of what."""
