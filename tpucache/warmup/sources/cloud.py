"""Samples at URLs: images in a bucket, a .zip on any server, other files of samples.

Workers read single files when they need them. A .zip's directory is read once, and then each file by its offset.
Files of other kinds are first copied to this machine. A network failure is never treated as a broken sample: it ends
the build, and the next run continues.
"""

from __future__ import annotations

import fnmatch
import functools
import posixpath
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

from tpucache.errors import FormatError, SampleError, SourceError, StoreError
from tpucache.progress import Progress
from tpucache.store.ahead import cached_for_threads
from tpucache.store.files import as_url, check_is_local, is_url
from tpucache.text import shown
from tpucache.warmup.sources import parquet, table, tfrecords, tree
from tpucache.warmup.sources.archives import list_zip, plain_members, read_zip, zip_file
from tpucache.warmup.sources.columns import TableOptions
from tpucache.warmup.sources.kept import Files, kept_listings
from tpucache.warmup.sources.source import (
    DerivedSource,
    Listing,
    Member,
    Source,
    SourceKind,
    expand_braces,
    find_files,
    has_wildcard,
)
from tpucache.warmup.sources.table import OPTIONS, TableSource
from tpucache.warmup.sources.tree import TreeSource

if TYPE_CHECKING:
    from tpucache.store.remote.cache import Copies
    from tpucache.store.remote.url import Remote

_WEB: Final = ("https", "http")
_SCHEMES: Final = ("gs", "s3", "hf", *_WEB, "az", "abfs", "memory")
_PARQUET: Final = ".parquet"
_COMPRESSED: Final = (".tgz", ".gz", ".bz2", ".xz", ".zst")
#: The kinds of files that are copied, by the beginnings of their suffixes.
_COPIED: Final = {_PARQUET: parquet.KIND, ".tfrec": tfrecords.KIND, ".tar": tree.ARCHIVE}
#: The most bytes that are read from one file. A larger file is not a photograph.
_LARGEST: Final = 1 << 30


class CloudFiles:
    """The files in a folder at a URL."""

    is_several = False
    inside = "."

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def __str__(self) -> str:
        return shown(self._url)

    def entries(self, names: Iterable[str] | None = None) -> dict[str, Member]:
        """Return all files by name; of a web server, which does not list them, those that have these `names`."""
        if urlsplit(self._url).scheme.lower() in _WEB:
            inside = (name for name in map(posixpath.normpath, names or ()) if not name.startswith(("/", "..")))
            return {name: Member("", name) for name in inside}
        return {name: Member("", name, bytes=size) for name, size in _files(self._url).items()}

    def read(self, member: Member, path: str) -> bytes:
        """Return a file's content."""
        remote = _open(self._url)
        try:
            return remote.read(member.name, _LARGEST)
        except FormatError:
            raise SampleError(path, f"has more than {_LARGEST:,} bytes, the most that a file may have") from None
        except StoreError:
            if remote.size(member.name) is None:
                raise SampleError(path, f"is no longer at {self}") from None
            raise


class CloudZip(CloudFiles):
    """The files of a .zip at a URL."""

    inside = ""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._folder, self._name = _split(url)

    def entries(self, _: Iterable[str] | None = None) -> dict[str, Member]:
        size = _size(self._folder, self._name)
        fetch = functools.partial(_open(self._folder).part, self._name)
        with Progress(None, "list", "files", is_brief=True) as progress, zip_file(fetch, size) as file:
            members = list_zip(file, str(self), self._name, progress.advance)
        return plain_members(members, str(self))

    def read(self, member: Member, path: str) -> bytes:
        if member.bytes > _LARGEST:
            raise SampleError(path, f"has {member.bytes:,} bytes: a file may have at most {_LARGEST:,}")
        remote = _open(self._folder)
        size = _kept_size(self._folder, self._name)

        def pread(count: int, offset: int) -> bytes:
            return remote.part(self._name, offset, min(size, offset + count)) if offset < size else b""

        return read_zip(pread, member, path)


@dataclass(frozen=True, repr=False)
class CopiedSource(DerivedSource):
    """The samples in files at a URL that were copied to this machine."""

    source: Source
    url: str
    copies: Copies

    def __repr__(self) -> str:
        return shown(self.url)

    def list(self) -> Listing:
        """Return all samples; errors name the files at the URL."""
        try:
            return self.source.list()
        except SourceError as error:
            raise SourceError(str(error).replace(str(self.copies.folder), shown(_split(self.url)[0]))) from error


def copy_source(url: str, kind: SourceKind, options: TableOptions | None) -> CopiedSource:
    """Copy the file at a URL, or those that match a pattern, and return their source, which is of a local kind."""
    from tpucache.store.remote.cache import copy_files

    (options or TableOptions()).check_used(kind.options, f"{shown(url)} is {kind.description}")
    folder, name = _split(url)
    patterns = expand_braces(name)
    files = _files(folder) if any(map(has_wildcard, patterns)) else dict.fromkeys(patterns, 0)
    chosen: set[str] = set()
    for pattern in [name] if name in files else patterns:
        matched = {each for each in files if each == pattern or fnmatch.fnmatchcase(each, pattern)}
        if not matched:
            raise SourceError(f"{shown(url)}: there are no such files as {pattern}")
        chosen |= matched
    with Progress(sum(files[each] for each in chosen) or None, "copy", "bytes") as progress:
        copies = copy_files(url, folder, sorted(chosen), progress.advance)
    pattern = f"**/*{PurePosixPath(patterns[0]).suffix}" if any("/" in each for each in chosen) else name
    if len(find_files(copies.folder, pattern)) < len(chosen):
        raise SourceError(f"{shown(url)} means hidden files, or others than on a disk: give a plainer pattern")
    return CopiedSource(kind.open(copies.folder / pattern, options), url, copies)


def _files(url: str) -> Files:
    """Return the sizes in bytes of the files below a URL, by name. An earlier listing of this build is used again."""
    kept = kept_listings()
    files = kept.get(url) if kept else None
    if files is None:
        with closing(_open(url)) as remote, Progress(None, "list", "files", is_brief=True) as progress:
            files = remote.files()
            progress.advance(len(files))
    if kept:
        kept.put(url, files)
    return files


@cached_for_threads(4)
def _open(url: str) -> Remote:
    from tpucache.store.remote.url import Remote

    return Remote(url)


def _size(folder: str, name: str) -> int:
    size = _open(folder).size(name)
    if size is None:
        raise SourceError(f"{shown(folder)}/{name} does not exist, or its server does not say how large it is")
    return size


_kept_size: Final = cached_for_threads(64)(_size)


def _split(url: str) -> tuple[str, str]:
    """Return the URL of a file's folder, including the query, and the file's name."""
    parts = urlsplit(url)
    folder, _, name = parts.path.rpartition("/")
    return urlunsplit(parts._replace(path=folder)), name


def _open_source(source: str | Path, options: TableOptions | None) -> Source:
    url = as_url(source)
    path = PurePosixPath(urlsplit(url).path)
    suffix = PurePosixPath(expand_braces(path.name)[0]).suffix.lower()
    if suffix == ".zip":
        return TreeSource(CloudZip(url), options)
    if suffix in _COMPRESSED:
        raise SourceError(f"{shown(url)}: a compressed file at a URL cannot be read: decompress it, or make a .zip")
    if kind := next((kind for start, kind in _COPIED.items() if suffix.startswith(start)), None):
        return copy_source(url, kind, options)
    if suffix == ".json" or has_wildcard(path.name):
        check_is_local(url)
    if suffix == ".csv":
        root = (options or TableOptions()).root
        files = CloudFiles(as_url(root or _split(url)[0])) if root is None or is_url(root) else None
        return copy_source(url, table.KIND._replace(open=lambda path, given: TableSource(path, given, files)), options)
    if urlsplit(url).scheme.lower() in _WEB:
        raise SourceError(f"{shown(url)}: a web server does not list its files: give the URL of a file of samples")
    return TreeSource(CloudFiles(url), options)


KIND: Final = SourceKind(
    "a URL of a folder of images (gs://, s3://, hf://), or of .zip, .tar, parquet or TFRecord files",
    lambda source: "://" in as_url(source) and as_url(source).partition("://")[0].lower() in _SCHEMES,
    _open_source,
    OPTIONS,
)
