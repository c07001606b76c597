"""Source files -> shards: decode, presize, augment, encode, once, on a cheap CPU machine. Never torch."""
