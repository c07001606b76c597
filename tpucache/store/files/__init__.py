"""Files of any content: written whole or not at all, read in chunks, .npy headers, LMDB pages. Needs errors and redact alone."""
