"""Batches for JAX programs: uploaded ahead as sharded arrays, then decoded and augmented on the device.

Importing this package loads no other module: each public name is imported when it is first used (PEP 562).
"""

from tpucache.plugins import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
