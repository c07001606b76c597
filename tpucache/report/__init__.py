"""Reports: what a cache or a run contains, how fast a cache is read, and what this machine has."""
