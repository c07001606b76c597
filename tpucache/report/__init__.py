"""Reports: what a cache contains, how fast it is read, and what this machine has; and the parts of all pages."""
