"""Drop-in data sets, which read a cache: torchvision's ImageFolder, any map-style data set, and Hugging Face's.

Their names are public in `tpucache`. The first use builds the cache, and later uses find it.
"""
