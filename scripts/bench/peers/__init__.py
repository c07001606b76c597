"""The processes that a benchmark compares. The shared modules need numpy at most."""
