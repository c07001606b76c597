"""Read the files of a cache at a URL or on Kaggle, copy them to this machine, and write them there."""
