"""Source files -> shards: decode, presize, augment, encode, once, on a cheap CPU machine. Never torch.

Importing this loads nothing: each public name is imported when it is first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpucache.imports import lazy_names

if TYPE_CHECKING:
    from tpucache.recipe import Recipe
    from tpucache.warmup.build import build_cache
    from tpucache.warmup.build_options import LabelKind
    from tpucache.warmup.estimate import Estimate
    from tpucache.warmup.relabel import relabel_cache
    from tpucache.warmup.repair import repair_cache
    from tpucache.warmup.run.executors import Executor
    from tpucache.warmup.run.scheduler import BuildProgress
    from tpucache.warmup.sources import (
        ArchiveSource,
        DatasetSource,
        FolderSource,
        ParquetSource,
        Sample,
        Source,
        TableOptions,
        TableSource,
        TFRecordSource,
        box_source,
        label_source,
        open_source,
        pad_source,
        select_source,
    )
    from tpucache.warmup.sources.source import Item, Listing
    from tpucache.warmup.trial import DryRun, dry_run

_HOMES: Final = {
    "ArchiveSource": "tpucache.warmup.sources",
    "BuildProgress": "tpucache.warmup.run.scheduler",
    "DatasetSource": "tpucache.warmup.sources",
    "DryRun": "tpucache.warmup.trial",
    "Estimate": "tpucache.warmup.estimate",
    "Executor": "tpucache.warmup.run.executors",
    "FolderSource": "tpucache.warmup.sources",
    "Item": "tpucache.warmup.sources.source",
    "LabelKind": "tpucache.warmup.build_options",
    "Listing": "tpucache.warmup.sources.source",
    "ParquetSource": "tpucache.warmup.sources",
    "Recipe": "tpucache.recipe",
    "Sample": "tpucache.warmup.sources",
    "Source": "tpucache.warmup.sources",
    "TFRecordSource": "tpucache.warmup.sources",
    "TableOptions": "tpucache.warmup.sources",
    "TableSource": "tpucache.warmup.sources",
    "box_source": "tpucache.warmup.sources",
    "build_cache": "tpucache.warmup.build",
    "dry_run": "tpucache.warmup.trial",
    "label_source": "tpucache.warmup.sources",
    "open_source": "tpucache.warmup.sources",
    "pad_source": "tpucache.warmup.sources",
    "relabel_cache": "tpucache.warmup.relabel",
    "repair_cache": "tpucache.warmup.repair",
    "select_source": "tpucache.warmup.sources",
}

__all__ = [
    "ArchiveSource",
    "BuildProgress",
    "DatasetSource",
    "DryRun",
    "Estimate",
    "Executor",
    "FolderSource",
    "Item",
    "LabelKind",
    "Listing",
    "ParquetSource",
    "Recipe",
    "Sample",
    "Source",
    "TFRecordSource",
    "TableOptions",
    "TableSource",
    "box_source",
    "build_cache",
    "dry_run",
    "label_source",
    "open_source",
    "pad_source",
    "relabel_cache",
    "repair_cache",
    "select_source",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
