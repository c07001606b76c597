"""Batches for JAX programs: uploaded ahead as sharded arrays, finished and augmented on the device.

Importing this loads nothing: each public name is imported when it is first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpucache.imports import lazy_names

if TYPE_CHECKING:
    from tpucache.jax.batches import Feed, feed
    from tpucache.ondevice.settings import AugmentSettings

_HOMES: Final = {
    "AugmentSettings": "tpucache.ondevice.settings",
    "Feed": "tpucache.jax.batches",
    "feed": "tpucache.jax.batches",
}

__all__ = ["AugmentSettings", "Feed", "feed"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
