"""Batches for JAX programs: uploaded ahead as sharded arrays, finished and augmented on the device.

Importing this loads nothing: each public name is imported when it is first used (PEP 562).
"""

from tpucache.imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
