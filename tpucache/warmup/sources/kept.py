"""Keeps listings of URLs and copies of streams until a build is finished, so that its next run can use them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from tpucache.store.files import read_file, write_atomically
from tpucache.text import parse_json

Files = Mapping[str, int]

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
        """Write the listings into the work folder. Raises OSError."""
        for name, files in self._found.items():
            write_atomically(self._path(name), json.dumps(files).encode())

    def copy_folder(self, name: str) -> Path:
        """Return this build's folder for the copy of the stream `name`. `discard` removes it."""
        folder = sources_folder() / f"stream-{digest(f'{name} {self._work}')}"
        self._copies.add(folder)
        return folder

    def discard(self) -> None:
        """Remove the copies of streams, because the build is finished."""
        for folder in self._copies:
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._work / f"files-{digest(name)}.json"


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
    """Make and return this machine's folder for copies of sources. Raises StoreError if it belongs to another user."""
    from tpucache.store.remote.cache import COPIES, default_directory, own_folder

    below = default_directory().expanduser().absolute()
    return own_folder(below / COPIES, below)


def digest(name: str) -> str:
    """Return a short name for a URL or a stream, to be used as a file name."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]
