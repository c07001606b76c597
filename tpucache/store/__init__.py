"""The on-disk format of a cache: what is written, how it is read, and how it is verified and copied."""
