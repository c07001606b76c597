"""The public names of the package; its `__init__.py` reads them here, and imports each when it is first used."""

from tpucache.jax.batches import Feed as Feed, feed as feed, process_slice as process_slice
from tpucache.ondevice.settings import AugmentSettings as AugmentSettings
