"""Decode, normalise and augment whole batches on the accelerator, with operators that torch and JAX share.

No module here imports torch_xla or reads a file. Importing this package loads no other module: each public name is
imported when it is first used (PEP 562).
"""

from tpucache.plugins import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
