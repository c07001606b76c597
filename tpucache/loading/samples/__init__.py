"""Which samples of a cache, in which order and in which variant. Needs numpy alone, and reads no record."""
