"""Train a model on a cache and predict with it, or use the parts in a training loop of your own.

Importing this package loads no other module: each public name is imported when it is first used (PEP 562).
"""

from tpucache.plugins import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
