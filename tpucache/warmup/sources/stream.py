"""Copies a stream, a dataset that can only be iterated, to this machine when it is listed.

Workers need items in any order, and again after a kill. So all items of a stream are written into one file, and their
offsets into another file. Reading these files never executes code.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import struct
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from tpucache.errors import SampleError, SourceError
from tpucache.progress import Progress
from tpucache.store.ahead import cached_for_threads
from tpucache.store.files import OpenFile
from tpucache.text import parse_json
from tpucache.warmup.sources.kept import kept_listings, sources_folder
from tpucache.warmup.sources.source import Item, Label

_ITEMS, _STARTS = "items", "starts.npy"
#: An item begins with the length of its head, and the CRC-32 of its head and of its fields.
_START: Final = struct.Struct("<3I")
#: The bytes of an item that are read for its label; usually they are enough.
_FIRST: Final = 4096

T = TypeVar("T")


class Copy:
    """The copied items of a stream, numbered from 0. Unless a build keeps the copy, it is removed with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._folder = Path()

    def make(self, items: Iterable[Item | SampleError]) -> int:
        """Copy all items, unless an earlier run of this build has done so. Return the number of items.

        In place of an item that cannot be stored, its SampleError is stored. Raises SourceError if the copy cannot be
        written, for example because the disk is full. Errors that the stream raises are passed on.
        """
        kept = kept_listings()
        try:
            if kept is None:
                self._folder = Path(tempfile.mkdtemp(prefix="stream-", dir=sources_folder()))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
                return self._write(items)
            self._folder = kept.copy_folder(self._name)
            known, count = kept.get(self._name), _count(self._folder)
            if count is None or known != {_ITEMS: count}:
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
        """Return the item `number`; errors name it `path`.

        Raises SampleError if this item of the stream could not be copied, SourceError if the file of copies is damaged.
        """
        return self._read(number, lambda read, size: _decoded(read(0, size), path))

    def label(self, number: int, path: str) -> Label:
        """Return only the label of an item. Raises SampleError and SourceError as `load` does."""
        return self._read(number, lambda read, _: _label(_head(read(0, _FIRST), read, path)))

    def _read(self, number: int, decode: Callable[[Callable[[int, int], bytes], int], T]) -> T:
        """Return `decode(read, size)` for an item of `size` bytes, where `read(at, count)` reads some of its bytes."""
        try:
            file, starts = _opened(self._folder, (self._folder / _STARTS).stat().st_mtime_ns)
            start, stop = starts[number : number + 2].tolist()
            return decode(
                lambda at, size: os.pread(file.number, min(size, stop - start - at), start + at), stop - start
            )
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
                starts.append(starts[-1] + sum(map(file.write, _encoded(item))))
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


def _encoded(item: Item | SampleError) -> Iterator[bytes]:
    if isinstance(item, SampleError):
        head: dict[str, Any] = {"error": item.reason}
        parts: list[bytes] = []
    else:
        parts = [
            value if isinstance(value, bytes) else np.ascontiguousarray(value).tobytes()
            for value in item.fields.values()
        ]
        fields = [
            [name, len(part), *([] if isinstance(value, bytes) else [value.dtype.str, value.shape])]
            for (name, value), part in zip(item.fields.items(), parts, strict=True)
        ]
        head = {"fields": fields, "label": item.label, "columns": dict(item.columns)}
    data = json.dumps(head).encode()
    yield _START.pack(len(data), zlib.crc32(data), functools.reduce(_add_crc, parts, 0))
    yield data
    yield from parts


def _add_crc(crc: int, data: bytes) -> int:
    return zlib.crc32(data, crc)


def _head(first: bytes, read: Callable[[int, int], bytes], path: str) -> Any:
    """Return the JSON head of an item that begins with `first`; `read(at, size)` reads more of the item.

    Raises the SampleError that was stored in place of the item, and ValueError if the head is damaged.
    """
    length, crc, _ = _START.unpack_from(first)
    end = _START.size + length
    data = (first if len(first) >= end else read(0, end))[_START.size : end]
    if zlib.crc32(data) != crc:
        raise ValueError("the copy was changed after it was made")
    head = parse_json(data)
    if "error" in head:
        raise SampleError(path, head["error"])
    return head


def _label(head: Any) -> Label:
    return tuple(head["label"]) if isinstance(head["label"], list) else head["label"]


def _decoded(data: bytes, path: str) -> Item:
    head = _head(data, lambda at, size: data[at : at + size], path)
    length, _, crc = _START.unpack_from(data)
    end = _START.size + length
    if zlib.crc32(memoryview(data)[end:]) != crc:
        raise ValueError("the copy was changed after it was made")
    fields: dict[str, Any] = {}
    for name, size, *kind in head["fields"]:
        part, end = data[end : end + size], end + size
        fields[name] = np.frombuffer(part, kind[0]).reshape(kind[1]).copy() if kind else part
    return Item(fields, _label(head), head["columns"])
