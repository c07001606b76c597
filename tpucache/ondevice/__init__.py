"""What an accelerator does to whole batches, in plain torch operators: no torch_xla, and no files.

Importing this loads nothing: each public name is imported when it is first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpucache.lazy import lazy_names

if TYPE_CHECKING:
    from tpucache.ondevice.augment import Augment, draw
    from tpucache.ondevice.finish import decoder
    from tpucache.ondevice.normalise import Normalise
    from tpucache.ondevice.settings import AugmentSettings

_HOMES: Final = {
    "Augment": "tpucache.ondevice.augment",
    "AugmentSettings": "tpucache.ondevice.settings",
    "Normalise": "tpucache.ondevice.normalise",
    "decoder": "tpucache.ondevice.finish",
    "draw": "tpucache.ondevice.augment",
}

__all__ = [
    "Augment",
    "AugmentSettings",
    "Normalise",
    "decoder",
    "draw",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
