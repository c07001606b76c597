"""Checks with real processes, each run as `python -m scripts.checks NAME`."""
