"""Checks of a cache's data: copies of pictures, folds that keep copies together, and labels that may be wrong.

Importing this package loads no other module: each public name is imported when it is first used (PEP 562).
"""

from tpucache.plugins import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
