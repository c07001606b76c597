"""Sources of samples: each source lists its samples in a stable order, and loads one sample at a time.

Other packages add kinds of sources by entry points of the group `tpucache.sources`. Each names a SourceKind.
"""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path
from typing import Any, Final, cast

from tpucache.errors import DependencyError, SourceError
from tpucache.plugins import PartTable
from tpucache.store.files import check_is_local, is_url
from tpucache.warmup.sources import cloud, datasets, parquet, table, tfrecords, tree
from tpucache.warmup.sources.coco import box_source
from tpucache.warmup.sources.columns import TableOptions
from tpucache.warmup.sources.datasets import DatasetSource, pad_source
from tpucache.warmup.sources.labelled import label_source
from tpucache.warmup.sources.parquet import ParquetSource
from tpucache.warmup.sources.source import (
    CheckedSource,
    Item,
    Items,
    Listing,
    Sample,
    Source,
    SourceKind,
    select_source,
)
from tpucache.warmup.sources.table import TableSource
from tpucache.warmup.sources.tfrecords import TFRecordSource
from tpucache.warmup.sources.tree import ArchiveSource, FolderSource

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


#: How to convert other lists of files to a table with commas.
_LISTS: Final = {
    ".tsv": "`python -c \"import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter='\\t'))\" "
    "< {path} > table.csv` makes a .csv of it",
    ".jsonl": "`python -c \"import pandas; pandas.read_json('{path}', lines=True).to_csv('table.csv', index=False)\"` "
    "makes a .csv of it",
    ".txt": "for lines such as `cat/1.jpg 3`, make a .csv by `(echo path,label; sed 's/ /,/' {path}) > table.csv`",
}


#: Where all kinds of sources are listed.
_MORE_KINDS: Final = "`tpucache warmup --help` names the other kinds of sources"


def _check_kind(_name: str, part: Any) -> SourceKind:
    if not isinstance(part, SourceKind):
        raise TypeError(f"{part!r} is not a tpucache.warmup.sources.SourceKind")
    return part


#: All kinds of sources; the first that matches is opened.
_KINDS: Final = PartTable[SourceKind](
    "tpucache.sources",
    {
        "saved": datasets.SAVED,
        "folder": tree.FOLDER,
        "images": tree.IMAGES,
        "table": table.KIND,
        "archive": tree.ARCHIVE,
        "parquet": parquet.KIND,
        "tfrecord": tfrecords.KIND,
        "dataset": datasets.KIND,
        "cloud": cloud.KIND,
    },
    _check_kind,
)


def to_source(source: str | Path | Source | Items) -> Source:
    """Return the source of a path, a pattern, a name or a dataset; a source is wrapped in a CheckedSource."""
    if isinstance(source, (str, Path)):
        return open_source(source)
    if hasattr(source, "list") and hasattr(source, "load"):
        return CheckedSource(cast(Source, source))
    return DatasetSource(cast(Items, source))


def open_source(source: str | Path, options: TableOptions | None = None) -> Source:
    """Return the source that a path, pattern or name stands for; `options` say what its columns or features mean.

    tpucache's own kinds of sources are tried first. Raises SourceError for a text that matches no kind of source, and
    UsageError for a URL that matches none, or for options that the source does not have.
    """
    kind = _find_kind(source)
    if kind is not None:
        (options or TableOptions()).check_used(kind.options, f"{source} is {kind.description}")
        opened = kind.open(source, options)
        return opened if kind in map(_KINDS.__getitem__, _KINDS.own) else CheckedSource(opened)
    check_is_local(source)
    path = Path(source)
    if path.is_file() and (advice := _LISTS.get(path.suffix.lower())):
        advice = advice.format(path=shlex.quote(str(source)))
        raise SourceError(f"{path} is not a .csv, as tables must be: {advice}")
    added = [_KINDS[name].description for name in _KINDS.others()]
    more = _MORE_KINDS + (f", and installed packages add {', '.join(added)}" if added else "")
    if path.exists():
        raise SourceError(f"{path} is a file of an unknown kind: give a folder of images or a .csv; {more}")
    raise SourceError(f"{path} does not exist{_nearest(path)}; {more}")


def _nearest(path: Path) -> str:
    """Return the end of a message: in which folder a missing path was looked for, and a similar name there."""
    folder = next(folder for folder in path.absolute().parents if folder.is_dir())
    similar = difflib.get_close_matches(path.name, (each.name for each in folder.iterdir()), n=1)
    return f" in {folder}: " + (f"did you mean {similar[0]}?" if similar else "check its name")


def _find_kind(source: str | Path) -> SourceKind | None:
    """Return the first kind of source that matches a text, or None.

    `module:callable` is tried last, because texts of other kinds may have this form, too. If no kind matches, and a
    kind of another package could not be imported, the DependencyError of that import is raised.
    """
    own = [cloud.KIND] if is_url(source) else [_KINDS[name] for name in _KINDS.own]
    if found := next((kind for kind in own if kind is not datasets.KIND and kind.matches(source)), None):
        return found
    failures: list[DependencyError] = []
    for name in _KINDS.others():
        try:
            if _KINDS.use(name, lambda kind: kind.matches(source)):
                return _KINDS[name]
        except DependencyError as error:
            failures.append(error)
    if datasets.KIND in own and datasets.KIND.matches(source):
        return datasets.KIND
    for failure in failures:
        raise failure
    return None
