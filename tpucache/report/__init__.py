"""What a cache holds, how fast it reads, and what this machine has for it."""
