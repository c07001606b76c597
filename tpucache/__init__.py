"""Decode, resize and augment once; then read batches at memory speed, so that the accelerator never waits.

This package has the names that are used most. Training is in `tpucache.training`, sources are in `tpucache.warmup`,
errors in `tpucache.errors`. `import tpucache` imports none of the modules that define the names: each name is imported
when it is first used (PEP 562).
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # a clone can be run by any Python
    raise ImportError(f"tpucache needs Python 3.11 or newer, and this is Python {sys.version.partition(' ')[0]}")

from tpucache.plugins import lazy_names
from tpucache.version import __version__ as __version__

# Errors are public in `tpucache.errors`; they can be imported from here, too.
__getattr__, __dir__, __all__ = lazy_names(__name__, hidden="tpucache.errors")
