"""Records into the buffers of batches, from files or from memory. Needs numpy alone."""
