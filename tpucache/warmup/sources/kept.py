"""What is kept of URLs and streams until a build is finished, so that its next run can use it.

These are listings of URLs, and copies of streams: workers need items in any order, and again after a kill. So all items
of a stream are written into one file, and their offsets into another file. Reading these files never executes code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import struct
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import SampleError, SourceError
from tpucache.progress import Progress
from tpucache.store.ahead import cached_for_threads
from tpucache.store.files import OpenFile, read_file, write_atomically
from tpucache.text import parse_json
from tpucache.warmup.sources.source import Item, Label

Files = Mapping[str, int]

_ITEMS, _STARTS = "items", "starts.npy"
#: An item begins with the length of its head, and the CRC-32 of its head and of its fields.
_START: Final = struct.Struct("<3I")

_kept: ContextVar[KeptListings | None] = ContextVar("kept", default=None)


class KeptListings:
    """Listings of sources in the work folder of a build, so that the next run of the build does not list them again."""

    def __init__(self, work: Path) -> None:
        """Set the work folder. It need not exist yet."""
        self._work = work
        self._found: dict[str, Files] = {}
        self._copies: set[Path] = set()

    def get(self, name: str) -> Files | None:
        """Return the files and sizes that an earlier run of this build found at a URL, or None.

        For a stream, the size is the number of copied items.
        """
        try:
            content = parse_json(read_file(self._path(name)))
        except (OSError, ValueError):
            return None
        is_right = isinstance(content, dict) and all(isinstance(size, int) for size in content.values())
        return content if is_right else None

    def put(self, name: str, files: Files) -> None:
        """Store a listing in memory; `save` writes it."""
        self._found[name] = files

    def save(self) -> None:
        """Write the listings into the work folder."""
        for name, files in self._found.items():
            write_atomically(self._path(name), json.dumps(files).encode())

    def copy_folder(self, name: str) -> Path:
        """Return this build's folder for the copy of the stream `name`. `discard` removes it."""
        folder = sources_folder() / f"stream-{_digest(f'{name} {self._work}')}"
        self._copies.add(folder)
        return folder

    def discard(self) -> None:
        """Remove the copies of streams, because the build is finished."""
        for folder in self._copies:
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._work / f"files-{_digest(name)}.json"


@contextmanager
def keeping_listings(work: Path) -> Iterator[KeptListings]:
    """While the `with` block runs, let sources look up what an earlier run of this build has listed."""
    kept = KeptListings(work)
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


def kept_listings() -> KeptListings | None:
    """Return the listings of the build that is listing its source now, or None outside of a build."""
    return _kept.get()


def sources_folder() -> Path:
    """Make and return this machine's folder for copies of sources."""
    from tpucache.store.remote.cache import COPIES, default_directory, own_folder

    below = default_directory().expanduser().absolute()
    return own_folder(below / COPIES, below)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


class Copy:
    """The copied items of a stream, numbered from 0. Unless a build keeps the copy, it is removed with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._folder = Path()

    def make(self, items: Iterable[Item | SampleError]) -> int:
        """Copy all items, unless an earlier run of this build has done so. Return the number of items.

        In place of an item that cannot be stored, its SampleError is stored. Errors that the stream raises are passed
        on.
        """
        kept = kept_listings()
        try:
            if kept is None:
                self._folder = Path(tempfile.mkdtemp(prefix="stream-", dir=sources_folder()))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
                return self._write(items)
            self._folder = kept.copy_folder(self._name)
            count = _count(self._folder)
            if count is None or kept.get(self._name) != {_ITEMS: count}:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.mkdir(parents=True)
                count = self._write(items)
            kept.put(self._name, {_ITEMS: count})
            return count
        except OSError as error:
            raise SourceError(
                f"{self._name} cannot be copied: {error}. Set TPUCACHE_DIR to a folder with more room"
            ) from error

    def load(self, number: int, path: str) -> Item:
        """Return the item `number`; errors name it `path`."""
        with self._reading(number) as read:
            return decoded(read, path)

    def label(self, number: int, path: str) -> Label:
        """Return only the label of an item."""
        with self._reading(number) as read:
            return _label(_head(read, path)[0])

    @contextmanager
    def _reading(self, number: int) -> Iterator[Callable[[int, int | None], bytes]]:
        """Give a function of an item's bytes from one place to another; None: to the end."""
        try:
            file, starts = _opened(self._folder, (self._folder / _STARTS).stat().st_mtime_ns)
            start, stop = starts[number : number + 2].tolist()

            def read(at: int, end: int | None) -> bytes:
                last = stop if end is None else min(stop, start + end)
                return os.pread(file.number, max(0, last - start - at), start + at)

            yield read
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            if not isinstance(error, OSError):  # the next run copies it again
                (self._folder / _STARTS).unlink(missing_ok=True)
            raise SourceError(
                f"the copy of {self._name} in {self._folder} cannot be read ({error}): run the same command again"
            ) from error

    def _write(self, items: Iterable[Item | SampleError]) -> int:
        folder = self._folder
        starts = [0]
        with (folder / _ITEMS).open("wb") as file, Progress(None, "copy", "items") as progress:
            for item in items:
                starts.append(starts[-1] + sum(map(file.write, encoded(item))))
                progress.advance(1)
        np.save(folder / f"new-{_STARTS}", np.array(starts, np.int64))
        (folder / f"new-{_STARTS}").replace(folder / _STARTS)
        return len(starts) - 1


def _count(folder: Path) -> int | None:
    """Return the number of items in a finished copy, or None if there is no finished copy."""
    with contextlib.suppress(OSError, ValueError):
        starts = np.load(folder / _STARTS, allow_pickle=False)
        if starts.ndim == 1 and len(starts) and (folder / _ITEMS).stat().st_size == starts[-1]:
            return len(starts) - 1
    return None


@cached_for_threads(4)
def _opened(folder: Path, _version: int) -> tuple[OpenFile, Any]:
    """Return the open file of a copy, and the offsets of its items.

    `_version`, the modification time of the offsets, only makes the cache open the files again after a new copy.
    """
    return OpenFile(folder / _ITEMS), np.load(folder / _STARTS, allow_pickle=False)


def encoded(item: Item | SampleError) -> Iterator[bytes]:
    """Yield the parts of an item's bytes in a copy."""
    parts: list[bytes] = []
    head: dict[str, Any] = {}
    if isinstance(item, SampleError):
        head["error"] = item.reason
    else:
        fields = []
        for name, value in item.fields.items():
            kind = () if isinstance(value, bytes) else (value.dtype.str, value.shape)
            parts.append(value if isinstance(value, bytes) else np.ascontiguousarray(value).tobytes())
            fields.append([name, len(parts[-1]), *kind])
        head = {"fields": fields, "label": item.label, "columns": dict(item.columns)}
    data = json.dumps(head).encode()
    yield _START.pack(len(data), zlib.crc32(data), functools.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0))
    yield data
    yield from parts


def _head(read: Callable[[int, int | None], bytes], path: str) -> tuple[Any, int, int]:
    """Return the JSON head of an item, where the head ends, and the CRC-32 of the fields."""
    length, crc, fields_crc = _START.unpack_from(read(0, _START.size))
    end = _START.size + length
    data = read(_START.size, end)
    if zlib.crc32(data) != crc:
        raise ValueError("the copy was changed after it was made")
    head = parse_json(data)
    if "error" in head:
        raise SampleError(path, head["error"])
    return head, end, fields_crc


def _label(head: Any) -> Label:
    return tuple(head["label"]) if isinstance(head["label"], list) else head["label"]


def decoded(read: Callable[[int, int | None], bytes], path: str) -> Item:
    """Return the item whose bytes from one place to another `read` returns."""
    head, end, crc = _head(read, path)
    data = read(end, None)
    if zlib.crc32(data) != crc:
        raise ValueError("the copy was changed after it was made")
    fields: dict[str, Any] = {}
    at = 0
    for name, size, *kind in head["fields"]:
        part, at = data[at : at + size], at + size
        fields[name] = np.frombuffer(part, kind[0]).reshape(kind[1]).copy() if kind else part
    return Item(fields, _label(head), head["columns"])
