"""Builds caches from source files: decodes, resizes, augments and encodes each sample once. Never imports torch.

Importing this package loads no module: each public name is imported when it is first used (PEP 562).
"""

from tpucache.imports import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
