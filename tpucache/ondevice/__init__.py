"""The device's work on whole batches, in operators that torch and JAX share. It imports no torch_xla and reads no
files.

Importing this package loads no other module: each public name is imported when it is first used (PEP 562).
"""

from tpucache.imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
