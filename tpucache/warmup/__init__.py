"""Builds caches from source files: decodes each sample once, resizes, augments and encodes it. Never imports torch.

Importing this package loads none of its modules: each public name is imported when it is first used (PEP 562).
"""

from tpucache.plugins import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
