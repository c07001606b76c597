"""Drop-in data sets: torchvision's ImageFolder, any map-style set and Hugging Face's, read out of a cache.

Their names are public in `tpucache`. The first use builds the cache, every later one finds it.
"""
