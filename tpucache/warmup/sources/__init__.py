"""Where samples come from: each source lists its samples in a stable order and loads one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast

from tpucache.errors import SourceError, UsageError
from tpucache.options import options_of
from tpucache.store.files import check_is_local
from tpucache.warmup.sources import archive_samples as archives
from tpucache.warmup.sources import datasets, folder, parquet, table, tfrecords
from tpucache.warmup.sources.archive_samples import ArchiveSource
from tpucache.warmup.sources.coco import box_source
from tpucache.warmup.sources.datasets import DatasetSource, pad_source
from tpucache.warmup.sources.folder import FolderSource
from tpucache.warmup.sources.labelled import label_source
from tpucache.warmup.sources.parquet import ParquetSource
from tpucache.warmup.sources.selected import select_source
from tpucache.warmup.sources.source import Items, Sample, Source, SourceKind
from tpucache.warmup.sources.table import TableOptions, TableSource
from tpucache.warmup.sources.tfrecords import TFRecordSource

__all__ = [
    "ArchiveSource",
    "DatasetSource",
    "FolderSource",
    "ParquetSource",
    "Sample",
    "Source",
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

#: All kinds of sources; the first that matches is opened.
_KINDS: Final[tuple[SourceKind, ...]] = (
    folder.KIND,
    table.KIND,
    archives.KIND,
    parquet.KIND,
    tfrecords.KIND,
    datasets.KIND,
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

    Raises SourceError when it is no source, UsageError for options that such a source does not have, and for a URL.
    """
    check_is_local(source)
    kind = next((kind for kind in _KINDS if kind.matches(source)), None)
    if kind is not None:
        given = [
            name for name, value in vars(options or TableOptions()).items() if value != getattr(TableOptions, name)
        ]
        unused = [options_of(TableOptions)[name].flag for name in given if name not in kind.options]
        if unused:
            raise UsageError(f"{source} is {kind.description}, which has no {unused[0]}: leave it out")
        return kind.open(source, options)
    *others, last = (kind.description for kind in _KINDS)
    problem = "is a file of another kind" if Path(source).exists() else "does not exist"
    raise SourceError(f"{Path(source)} {problem}: give {', '.join(others)}, or {last}")
