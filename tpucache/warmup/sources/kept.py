"""What is kept of URLs and streams until a build is finished, so that its next run can use it.

These are listings of URLs, and copies of streams: workers need items in any order, and again after a kill. All items of
a stream are written into one file, and where they begin, with their labels, into another. Reading them executes no
code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from tpucache.errors import SampleError, SourceError
from tpucache.progress import Progress
from tpucache.store.files import OpenFile, read_file, write_atomically
from tpucache.text import parse_json
from tpucache.warmup.sources.source import Item, Sample, cached_until_changed

Files = Mapping[str, int]

_ITEMS, _INDEX = "items", "index.json"

_kept: ContextVar[KeptListings | None] = ContextVar("kept", default=None)


class KeptListings:
    """Listings of sources in the work folder of a build, so that the next run of the build does not list them again."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._found: dict[str, Files] = {}
        self._copies: set[Path] = set()

    def get(self, name: str) -> Files | None:
        """Return what an earlier run of this build found at a URL, files and sizes, or None."""
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
        folder = _sources_folder() / f"stream-{_digest(f'{name} {self._work}')}"
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


def _sources_folder() -> Path:
    from tpucache.store.remote.cache import COPIES, cache_directory, own_folder

    below = cache_directory()
    return own_folder(below / COPIES, below)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


class Copy:
    """The copied items of a stream. Unless a build keeps the copy, it is removed with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._folder = Path()

    def make(self, items: Iterable[Item | SampleError]) -> list[Sample]:
        """Copy all items, unless an earlier run of this build has done so, and return them as samples.

        A SampleError in place of an item becomes the fault of its sample. Errors that the stream raises are passed on.
        """
        kept = kept_listings()
        try:
            if kept is None:
                self._folder = Path(tempfile.mkdtemp(prefix="stream-", dir=_sources_folder()))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
                self._write(items)
                return self._samples()
            self._folder = kept.copy_folder(self._name)
            with contextlib.suppress(OSError):
                if kept.get(self._name) == self._state():
                    kept.put(self._name, self._state())
                    return self._samples()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            self._write(items)
            kept.put(self._name, self._state())
            return self._samples()
        except OSError as error:
            raise SourceError(
                f"{self._name} cannot be copied: {error}. Set TPUCACHE_DIR to a folder with more room"
            ) from error

    def load(self, number: int) -> Item:
        """Return the item `number`."""
        index = self._folder / _INDEX
        try:
            file, content = _opened(index)
            start, stop = content["starts"][number : number + 2]
            return decoded(os.pread(file.number, stop - start, start))
        except (OSError, ValueError, SourceError) as error:
            index.unlink(missing_ok=True)  # the next run copies it again
            raise SourceError(
                f"the copy of {self._name} in {self._folder} cannot be read ({error}): run the same command again"
            ) from error

    def _state(self) -> Files:
        """Return what another run compares: the size of the items, and a checksum of what says where they are."""
        items, index = self._folder / _ITEMS, self._folder / _INDEX
        return {_ITEMS: items.stat().st_size, _INDEX: zlib.crc32(read_file(index))}

    def _samples(self) -> list[Sample]:
        labels, faults = (_opened(self._folder / _INDEX)[1][name] for name in ("labels", "faults"))
        return [
            Sample(number, str(number), tuple(label) if isinstance(label, list) else label, fault=fault)
            for number, (label, fault) in enumerate(zip(labels, faults, strict=True))
        ]

    def _write(self, items: Iterable[Item | SampleError]) -> None:
        starts, labels, faults = [0], list[Any](), list[str]()
        with (self._folder / _ITEMS).open("wb") as file, Progress(None, "copy", "items") as progress:
            for item in items:
                faults.append(item.reason if isinstance(item, SampleError) else "")
                kept = Item({}) if isinstance(item, SampleError) else item
                starts.append(starts[-1] + file.write(encoded(kept)))
                labels.append(kept.label)
                progress.advance(1)
        index = {"starts": starts, "labels": labels, "faults": faults}
        write_atomically(self._folder / _INDEX, json.dumps(index).encode())


@cached_until_changed(4)
def _opened(index: Path) -> tuple[OpenFile, Any]:
    """Return the open file of a copy, and what its index says."""
    return OpenFile(index.parent / _ITEMS), parse_json(read_file(index))


def encoded(item: Item) -> bytes:
    """Return an item without its label as bytes: a checksum, the length of a head in JSON, the head, and the fields."""
    parts, fields = [], []
    for name, value in item.fields.items():
        kind = () if isinstance(value, bytes) else (value.dtype.str, value.shape)
        parts.append(value if isinstance(value, bytes) else np.ascontiguousarray(value).tobytes())
        fields.append([name, len(parts[-1]), *kind])
    head = json.dumps([fields, dict(item.columns)]).encode()
    data = b"".join((len(head).to_bytes(4, "little"), head, *parts))
    return zlib.crc32(data).to_bytes(4, "little") + data


def decoded(data: bytes) -> Item:
    """Return the item of these bytes. Raises ValueError if they were changed."""
    if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
        raise ValueError("the copy was changed after it was made")
    at = 8 + int.from_bytes(data[4:8], "little")
    stated, columns = parse_json(data[8:at])
    fields: dict[str, Any] = {}
    for name, size, *kind in stated:
        part, at = data[at : at + size], at + size
        fields[name] = np.frombuffer(part, kind[0]).reshape(kind[1]).copy() if kind else part
    return Item(fields, columns=columns)
