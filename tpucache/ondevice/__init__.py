"""What an accelerator does to whole batches, in operators that torch and JAX share: no torch_xla, and no files.

Importing this loads nothing: each public name is imported when it is first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpucache.imports import lazy_names

if TYPE_CHECKING:
    from tpucache.ondevice.draws import draw
    from tpucache.ondevice.modules import Augment, Normalise, decoder
    from tpucache.ondevice.settings import AugmentSettings

_HOMES: Final = {
    "Augment": "tpucache.ondevice.modules",
    "AugmentSettings": "tpucache.ondevice.settings",
    "Normalise": "tpucache.ondevice.modules",
    "decoder": "tpucache.ondevice.modules",
    "draw": "tpucache.ondevice.draws",
}

__all__ = [
    "Augment",
    "AugmentSettings",
    "Normalise",
    "decoder",
    "draw",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
