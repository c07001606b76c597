"""The report of a cache as one HTML page."""
