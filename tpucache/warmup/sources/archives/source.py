"""Samples in archives: images by folders, as on disk, or files by keys, as in WebDataset's shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from tpucache.errors import UsageError
from tpucache.warmup.sources.archives.archive import ArchiveFiles, find_archive
from tpucache.warmup.sources.archives.groups import are_groups, list_groups, read_group
from tpucache.warmup.sources.base import Item, Listing, Member, Sample, Source, SourceKind
from tpucache.warmup.sources.folder import JUNK, FoundFile, list_images
from tpucache.warmup.sources.table import OPTIONS, TableOptions, TableSource

_TABLE: Final = ".csv"


class ArchiveSource:
    """The samples in one archive or several.

    Where an image has a `.cls` beside it, or JSON or text and no folder that could be its class, files of one key are a
    sample, as in WebDataset. Else images are listed as `FolderSource` does; folders that hold all of them are no class.
    """

    def __init__(self, files: ArchiveFiles, options: TableOptions | None = None) -> None:
        """Take the files of archives, and which keys of their JSON are labels; nothing is read yet."""
        self._files = files
        self._options = options or TableOptions()

    def __repr__(self) -> str:
        return str(self._files)

    def list(self) -> Listing:
        """Return all samples. Raises SourceError for archives that are broken or hold none."""
        files = _visible(self._files.list())
        folders = _places(files, self._files.is_several)
        if self._options.label_cols or are_groups([folders[name].as_posix() for name in files]):
            return list_groups(files, self._files.read, self._options, str(self._files))
        found = [FoundFile(PurePosixPath(name), folders[name], files[name].bytes, (files[name],)) for name in files]
        return list_images(self._files, found)

    def load(self, sample: Sample) -> Item:
        """Return a sample's fields. Raises SampleError when one of its files cannot be read."""
        return read_group(sample, self._files.read)


def _visible(files: Mapping[str, Member]) -> dict[str, Member]:
    """Return the files that are neither hidden nor what systems add to archives."""
    return {
        name: member
        for name, member in files.items()
        if not any(part.startswith(".") or part.lower() in JUNK for part in name.split("/"))
    }


def _places(files: Mapping[str, Member], is_several: bool) -> dict[str, PurePosixPath]:
    """Return each file's path without its archive's, and without the folders that hold all files."""
    places = {name: PurePosixPath(name) for name in files}
    if is_several:
        places = {name: place.relative_to(files[name].archive) for name, place in places.items()}
    shared = 0
    for parts in zip(*(place.parts[:-1] for place in places.values()), strict=False):
        if len(set(parts)) > 1:
            break
        shared += 1
    return {name: PurePosixPath(*place.parts[shared:]) for name, place in places.items()}


def _is_archive(source: str | Path) -> bool:
    return find_archive(source) is not None


def _open(source: str | Path, options: TableOptions | None) -> Source:
    files = find_archive(source)
    if files is None or files.inside.lower().endswith(_TABLE):
        return TableSource(source, options)
    wanted = options or TableOptions()
    if wanted == TableOptions() or files.is_several:
        return ArchiveSource(files, options)
    tables = [name for name in files.list() if name.lower().endswith(_TABLE)]
    if len(tables) > 1:
        raise UsageError(f"{files} holds {', '.join(tables)}: name one, as {Path(source) / tables[0]}")
    if tables:
        return TableSource(Path(source) / tables[0], options)
    return ArchiveSource(files, options)


KIND: Final = SourceKind("a .zip or .tar of images, or a pattern of such files", _is_archive, _open, OPTIONS)
