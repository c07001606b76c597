"""tpucache: after `tpucache warmup photos cache`."""

from tpucache import CachedDataset, CachedLoader

loader = CachedLoader(CachedDataset("cache"), 256, shuffle=True)
for images, labels in loader:
    print(images.shape, labels.shape, flush=True)
