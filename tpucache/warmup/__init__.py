"""Source files -> shards: decode, presize, augment, encode, once, on a cheap CPU machine. Never torch.

Importing this loads nothing: each public name is imported when it is first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpucache.lazy import lazy_names

if TYPE_CHECKING:
    from tpucache.recipe import Recipe
    from tpucache.warmup.build import build_cache
    from tpucache.warmup.planning.estimate import Estimate
    from tpucache.warmup.repair import repair_cache
    from tpucache.warmup.running.executor import Engine
    from tpucache.warmup.sources import (
        DatasetSource,
        FolderSource,
        LabelKind,
        Sample,
        Source,
        TableOptions,
        TableSource,
        TFRecordSource,
        label_source,
        open_source,
    )

_HOMES: Final = {
    "DatasetSource": "tpucache.warmup.sources",
    "Engine": "tpucache.warmup.running.executor",
    "Estimate": "tpucache.warmup.planning.estimate",
    "FolderSource": "tpucache.warmup.sources",
    "LabelKind": "tpucache.warmup.sources",
    "Recipe": "tpucache.recipe",
    "Sample": "tpucache.warmup.sources",
    "Source": "tpucache.warmup.sources",
    "TFRecordSource": "tpucache.warmup.sources",
    "TableOptions": "tpucache.warmup.sources",
    "TableSource": "tpucache.warmup.sources",
    "build_cache": "tpucache.warmup.build",
    "label_source": "tpucache.warmup.sources",
    "open_source": "tpucache.warmup.sources",
    "repair_cache": "tpucache.warmup.repair",
}

__all__ = [
    "DatasetSource",
    "Engine",
    "Estimate",
    "FolderSource",
    "LabelKind",
    "Recipe",
    "Sample",
    "Source",
    "TFRecordSource",
    "TableOptions",
    "TableSource",
    "build_cache",
    "label_source",
    "open_source",
    "repair_cache",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
