"""What a build keeps of its sources until it is finished: listings of URLs, and copies of streams of items."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from tpucache.store.files import read_file, write_atomically
from tpucache.strict_json import parse_json

Files = Mapping[str, int]

_kept: ContextVar[KeptListings | None] = ContextVar("kept", default=None)


class KeptListings:
    """What was found in sources, kept in the work folder of a build, so that the next run of it does not look again."""

    def __init__(self, work: Path) -> None:
        """Take the work folder, which need not be there yet."""
        self._work = work
        self._found: dict[str, Files] = {}
        self._copies: set[Path] = set()

    def get(self, name: str) -> Files | None:
        """Return the files and sizes that an earlier run of the same build found at a URL, None where there was none.

        Of a stream it is how many items were copied.
        """
        try:
            content = parse_json(read_file(self._path(name)))
        except (OSError, ValueError):
            return None
        is_right = isinstance(content, dict) and all(isinstance(size, int) for size in content.values())
        return content if is_right else None

    def put(self, name: str, files: Files) -> None:
        """Note what was found now."""
        self._found[name] = files

    def save(self) -> None:
        """Write what was found into the work folder. Raises OSError."""
        for name, files in self._found.items():
            write_atomically(self._path(name), json.dumps(files).encode())

    def copy_folder(self, name: str) -> Path:
        """Return the folder for a copy of a stream, which belongs to this build."""
        folder = sources_folder() / f"stream-{digest(f'{name} {self._work}')}"
        self._copies.add(folder)
        return folder

    def discard(self) -> None:
        """Remove the copies of streams: the build is finished."""
        for folder in self._copies:
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._work / f"files-{digest(name)}.json"


@contextmanager
def keeping_listings(work: Path) -> Iterator[KeptListings]:
    """Have sources look whether this build has listed them before, while the context lasts."""
    kept = KeptListings(work)
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


def kept_listings() -> KeptListings | None:
    """Return what the build keeps that lists its source now, None outside of one."""
    return _kept.get()


def sources_folder() -> Path:
    """Return the folder of this machine for copies of sources."""
    from tpucache.store.remote.cache import COPIES, default_directory

    return default_directory() / COPIES


def digest(name: str) -> str:
    """Return a short name of a URL or a stream, which is a file's name."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]
