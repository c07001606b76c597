"""What a cache can tell of its data: copies of pictures, folds that do not divide them, and labels to look at again.

Importing this loads nothing: each public name is imported when it is first used (PEP 562).
"""

from tpucache.imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
