"""The files of a cache at a URL or on Kaggle: read, copied to this machine, and written."""
