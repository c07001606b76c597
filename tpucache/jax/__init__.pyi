"""The public names of the package; its `__init__.py` reads them here, and imports each when it is first used."""

from tpucache.jax.batches import Feed as Feed, feed as feed
from tpucache.ondevice.settings import AugmentSettings as AugmentSettings
