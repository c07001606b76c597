"""What is kept of URLs and streams until a build is finished, so that its next run can use it.

These are listings in the build's work folder, and copies of streams: workers need items in any order, and again after a
kill. Reading them executes no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import SampleError, SourceError
from tpucache.progress import Progress
from tpucache.store.files import OpenFile, open_new, read_file, write_atomically
from tpucache.text import parse_json
from tpucache.warmup.sources.source import Item, Member, Sample, cached_until_changed

Files = Mapping[str, int]

_kept: ContextVar[KeptListings | None] = ContextVar("kept", default=None)


class KeptListings:
    """Listings of sources in the work folder of a build, so that the next run of the build does not list them again."""

    def __init__(self, work: Path) -> None:
        self._path = work / "listings"
        self._copies: set[Path] = set()
        self._listings: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            checksum, _, data = read_file(self._path).partition(b"\n")
            if checksum == b"%d" % zlib.crc32(data):
                self._listings = parse_json(data)

    def get(self, name: str) -> Any:
        """Return what this or an earlier run of this build has stored under a name, or None."""
        return self._listings.get(name)

    def put(self, name: str, listing: Any) -> None:
        """Store a listing, which is a value of JSON, in memory; `save` writes it."""
        self._listings[name] = listing

    def save(self) -> None:
        """Write the listings into the work folder."""
        if self._listings:
            data = json.dumps(self._listings).encode()
            write_atomically(self._path, b"%d\n%b" % (zlib.crc32(data), data))

    def copy_path(self, name: str) -> Path:
        """Return the path of this build's copy of the stream `name`. `discard` removes the file."""
        from tpucache.store.remote.cache import COPIES, cache_directory, own_folder

        below = cache_directory()
        owner = hashlib.sha256(f"{name} {self._path}".encode()).hexdigest()
        path = own_folder(below / COPIES, below) / f"stream-{owner}"
        self._copies.add(path)
        return path

    def discard(self) -> None:
        """Remove the copies of streams, because the build is finished."""
        for path in self._copies:
            with contextlib.suppress(OSError):
                path.unlink()


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


class Copy:
    """The copied items of a stream. Unless a build keeps the copy, it is removed with this object."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._path = Path()

    def make(self, items: Iterable[Item | SampleError]) -> list[Sample]:
        """Copy all items, unless an earlier run of this build has done so, and return them as samples.

        A SampleError in place of an item becomes the fault of its sample. Errors that the stream raises are passed on.
        """
        kept = kept_listings()
        if kept is None:
            kept = KeptListings(Path(secrets.token_hex()))  # in no folder
            weakref.finalize(self, kept.discard)
        try:
            self._path = kept.copy_path(self._name)
            rows = kept.get(self._name)
            if rows is None or not self._is_whole(rows):
                rows = self._write(items)
            kept.put(self._name, rows)
        except OSError as error:
            raise SourceError(
                f"{self._name} cannot be copied: {error}. Set TPUCACHE_DIR to a folder with more room"
            ) from error
        return [
            Sample(
                number,
                str(number),
                tuple(label) if isinstance(label, list) else label,
                members=(Member(*member),),
                fault=fault,
            )
            for number, (label, fault, member) in enumerate(rows)
        ]

    def load(self, member: Member) -> Item:
        """Return the item of a sample, which is a member of the copy."""
        try:
            data = os.pread(_opened(self._path).number, member.bytes, member.offset)
            if zlib.crc32(data) != member.checksum:
                raise ValueError("the copy was changed after it was made")
        except (OSError, ValueError, SourceError) as error:
            self._path.unlink(missing_ok=True)  # the next run copies it again
            raise SourceError(
                f"the copy of {self._name} in {self._path} cannot be read ({error}): run the same command again"
            ) from error
        return decoded(data)

    def _is_whole(self, rows: Sequence[Any]) -> bool:
        size = sum(Member(*member).bytes for _, _, member in rows)
        return self._path.exists() and self._path.stat().st_size == size

    def _write(self, items: Iterable[Item | SampleError]) -> list[Any]:
        """Write all items, and return the label, the fault and the member of each."""
        rows = list[Any]()
        with open_new(self._path, 0o600) as file, Progress(None, "copy", "items") as progress:
            for item in items:
                label, fault, data = None, "", b""
                if isinstance(item, SampleError):
                    fault = item.reason
                else:
                    label, data = item.label, encoded(item)
                rows.append((label, fault, Member("", "", file.tell(), len(data), len(data), zlib.crc32(data))))
                file.write(data)
                progress.advance(1)
        return rows


#: Opens a copy.
_opened: Final = cached_until_changed(4)(OpenFile)


def encoded(item: Item) -> bytes:
    """Return an item without its label as bytes: a line of JSON that describes the fields, and the fields."""
    stated, parts = [], []
    for name, value in item.fields.items():
        kind = None if isinstance(value, bytes) else (value.dtype.str, value.shape)
        parts.append(value if isinstance(value, bytes) else value.tobytes())
        stated.append((name, len(parts[-1]), kind))
    return b"\n".join((json.dumps((stated, dict(item.columns))).encode(), b"".join(parts)))


def decoded(data: bytes) -> Item:
    """Return the item of these bytes."""
    file = io.BytesIO(data)
    stated, columns = parse_json(file.readline())
    fields: dict[str, Any] = {}
    for name, size, kind in stated:
        part = file.read(size)
        fields[name] = np.frombuffer(part, kind[0]).reshape(kind[1]).copy() if kind else part
    return Item(fields, columns=columns)
