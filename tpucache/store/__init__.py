"""The on-disk format: writer and reader both stand on it, and meet only in bytes."""
