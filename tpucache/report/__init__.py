"""Shows what a cache or a run holds, how fast a cache reads, and what this machine has."""
