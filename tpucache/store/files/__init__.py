"""Files of any content: written whole or not at all, read in chunks, .npy headers, LMDB pages."""
