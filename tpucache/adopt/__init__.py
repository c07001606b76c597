"""Drop-in replacements for torchvision's ImageFolder, for any map-style data set, and for Hugging Face data sets.

They read from a cache. The first use builds the cache, and later uses find it. `tpucache` exports their names.
"""
