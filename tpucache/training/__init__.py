"""Batches -> steps: train a model on a cache, predict with it, or take the parts for a loop of your own.

Importing this loads nothing: each public name is imported when it is first used (PEP 562).
"""

from tpucache.imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
