"""Ways of reading shuffled batches, a module each."""
