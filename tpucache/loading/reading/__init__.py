"""Reads records into the buffers of batches, from files or from memory. Needs numpy only."""
