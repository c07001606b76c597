"""Where samples come from: each source yields them in a stable order and loads one at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tpucache.errors import SourceError, UsageError
from tpucache.warmup.sources.base import Sample, Source
from tpucache.warmup.sources.dataset import DatasetSource
from tpucache.warmup.sources.folder import FolderSource
from tpucache.warmup.sources.labelled import LabelKind, label_source
from tpucache.warmup.sources.table import TableOptions, TableSource
from tpucache.warmup.sources.tfrecord import NAMES, WILDCARD, TFRecordSource

__all__ = [
    "DatasetSource",
    "FolderSource",
    "LabelKind",
    "Sample",
    "Source",
    "TFRecordSource",
    "TableOptions",
    "TableSource",
    "label_source",
    "open_source",
]

_CALLABLE: Final = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_POSSIBLE: Final = (
    "give a folder of images, a .csv table of them, TFRecord files (one, or a pattern such as 'train-*.tfrec'), "
    "or module:callable of a dataset"
)


def open_source(source: str | Path, options: TableOptions | None = None) -> Source:
    """Return the source that a path, pattern or name stands for; `options` say what a table's columns mean.

    Raises SourceError when it stands for none, UsageError for options of something that is no table.
    """
    path = Path(source)
    if path.is_file() and path.suffix.lower() == ".csv":
        return TableSource(path, options)
    if options not in (None, TableOptions()):
        raise UsageError(f"{source} is no .csv file: leave out the options of a table, or give one")
    if path.is_dir():
        return FolderSource(path)
    if path.exists() and not (path.is_file() and NAMES.search(path.name.removesuffix(".gz"))):
        raise SourceError(f"{path} is a file of another kind: {_POSSIBLE}")
    if path.exists() or WILDCARD.search(str(source)):
        return TFRecordSource(path)
    if _CALLABLE.fullmatch(str(source)):
        return DatasetSource(str(source))
    raise SourceError(f"{path} does not exist: {_POSSIBLE}")
