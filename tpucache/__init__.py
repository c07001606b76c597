"""Decode, resize and augment once; then read batches at memory speed, so that the accelerator never waits.

This package has the names that are used most. Training is in `tpucache.training`, sources are in `tpucache.warmup`,
errors in `tpucache.errors`. `import tpucache` imports none of the modules that define the names: each name is imported
when it is first used (PEP 562).
"""

from tpucache.plugins import lazy_names
from tpucache.version import __version__ as __version__

# Errors are public in `tpucache.errors`; they can be imported from here, too.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__, hidden="tpucache.errors")
