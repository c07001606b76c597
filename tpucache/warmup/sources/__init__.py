"""Where samples come from: each source lists its samples in a stable order and loads one at a time.

Other packages add kinds of sources by entry points of the group `tpucache.sources`, each naming a SourceKind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

from tpucache.errors import SourceError, UsageError
from tpucache.options import options_of
from tpucache.plugins import Table
from tpucache.store.files import check_is_local, is_url
from tpucache.warmup.sources import archive_samples as archives
from tpucache.warmup.sources import datasets, folder, parquet, table, tfrecords
from tpucache.warmup.sources.archive_samples import ArchiveSource
from tpucache.warmup.sources.coco import box_source
from tpucache.warmup.sources.datasets import DatasetSource, pad_source
from tpucache.warmup.sources.folder import FolderSource
from tpucache.warmup.sources.labelled import label_source
from tpucache.warmup.sources.parquet import ParquetSource
from tpucache.warmup.sources.selected import select_source
from tpucache.warmup.sources.source import Item, Items, Listing, Sample, Source, SourceKind
from tpucache.warmup.sources.table import TableOptions, TableSource
from tpucache.warmup.sources.tfrecords import TFRecordSource

__all__ = [
    "ArchiveSource",
    "DatasetSource",
    "FolderSource",
    "Item",
    "Listing",
    "ParquetSource",
    "Sample",
    "Source",
    "SourceKind",
    "TFRecordSource",
    "TableOptions",
    "TableSource",
    "box_source",
    "label_source",
    "open_source",
    "pad_source",
    "select_source",
    "to_source",
]


def _check_kind(_name: str, part: Any) -> SourceKind:
    """Return another package's kind of source. Raises TypeError where it is none."""
    if not isinstance(part, SourceKind):
        raise TypeError(f"{part!r} is no tpucache.warmup.sources.SourceKind")
    return part


#: All kinds of sources; the first that matches is opened.
_KINDS: Final = Table[SourceKind](
    "tpucache.sources",
    {
        "folder": folder.KIND,
        "table": table.KIND,
        "archive": archives.KIND,
        "parquet": parquet.KIND,
        "tfrecord": tfrecords.KIND,
        "dataset": datasets.KIND,
    },
    _check_kind,
)


def to_source(source: str | Path | Source | Items) -> Source:
    """Return a source as it is, or that of a path, a pattern, a name or a dataset. Raises what `open_source` does."""
    if isinstance(source, (str, Path)):
        return open_source(source)
    if hasattr(source, "list") and hasattr(source, "load"):
        return cast(Source, source)
    return DatasetSource(cast(Items, source))


def open_source(source: str | Path, options: TableOptions | None = None) -> Source:
    """Return the source that a path, pattern or name means; `options` state what its columns or features mean.

    tpucache's own kinds of sources are asked first, but not for a URL, which none of them reads. Raises SourceError
    when it is no source, UsageError for options that such a source does not have, and for a URL.
    """
    names = [name for name in _KINDS if not (is_url(source) and name in _KINDS.own)]
    kind = next((_KINDS[name] for name in names if _KINDS[name].matches(source)), None)
    if kind is not None:
        given = [
            name for name, value in vars(options or TableOptions()).items() if value != getattr(TableOptions, name)
        ]
        unused = [options_of(TableOptions)[name].flag for name in given if name not in kind.options]
        if unused:
            raise UsageError(f"{source} is {kind.description}, which has no {unused[0]}: leave it out")
        return kind.open(source, options)
    check_is_local(source)
    *others, last = (kind.description for kind in _KINDS.values())
    problem = "is a file of another kind" if Path(source).exists() else "does not exist"
    raise SourceError(f"{Path(source)} {problem}: give {', '.join(others)}, or {last}")
