"""Looking at a cache: what it holds, how fast it reads."""
