"""Drop-in replacements for torchvision's ImageFolder, for any map-style data set, and for Hugging Face data sets.

They read from a cache. The first use builds the cache, and later uses find it. `tpucache` exports these names:
`ImageFolder`, `cached`, `from_hf`, `open_or_build`.
"""
