"""Local copies of whole files at a URL, for formats that cannot be read in parts. A copy's name is its SHA-256.

For each file, a note has the SHA-256 and the version that the store stated (such as an ETag). A copy is used again if
the store still states the same version, and the copy still has its SHA-256. All processes of a machine share one folder
per URL. Only one process copies a file, and nothing is removed while a process uses the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tpucache.errors import SourceError, StoreError
from tpucache.store.files import (
    OpenFile,
    OpenFolder,
    append_chunks,
    name_aside,
    read_file,
    rename_durably,
    sha256_file,
    write_atomically,
)
from tpucache.store.lock import check_locks, flock, only_one
from tpucache.store.remote.cache import COPIES, URL_NOTE, default_directory, own_folder
from tpucache.store.remote.local import STATE_NAME
from tpucache.store.remote.url_folder import Remote
from tpucache.text import parse_json, shown

_PART: Final = 8 << 20  # bytes per request


@dataclass(frozen=True)
class _Note:
    """What is known of a copied file. `tag` is the version that the store stated, such as an ETag, or ""."""

    name: str
    tag: str
    bytes: int
    sha256: str


class Copies(Mapping[str, Path]):
    """The local paths of copied files by their names at the URL.

    While this object exists, the folder with the copies is not removed. A pickled copy of the object does not protect
    it.
    """

    def __init__(self, place: str, files: Mapping[str, Path], use: OpenFile | None = None) -> None:
        """Store the URL without secrets (`place`), the local paths by name, and the open file that locks the folder."""
        self.place, self._files, self._use = place, dict(files), use

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, (self.place, self._files)

    def __getitem__(self, name: str) -> Path:
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def copy_files(url: str, folder: str, names: Iterable[str], advance: Callable[[int], None]) -> Copies:
    """Copy files from the folder at a URL to this machine. Files that were copied before are only verified."""
    check_locks("copying files from a URL")
    below = (default_directory() / COPIES / hashlib.sha256(url.encode()).hexdigest()[:32]).expanduser().absolute()
    found: dict[str, Path] = {}
    try:
        use = _hold(below)
        write_atomically(below / URL_NOTE, json.dumps({"url": shown(url)}).encode())
        with closing(Remote(folder)) as remote:
            for name in names:
                found[name] = _copy(remote, name, below)
                advance(found[name].stat().st_size)
    except OSError as error:
        raise StoreError(
            f"{below} cannot keep copies from {shown(url)}: {error}. Set TPUCACHE_DIR to a folder with enough space"
        ) from error
    return Copies(shown(folder), found, use)


def _hold(below: Path) -> OpenFile:
    """Lock a folder of copies for use, and return the open file with the lock.

    If no other process uses the folder, copies that are no longer needed are removed.
    """
    while True:
        own_folder(below, below.parents[1])
        use = OpenFile.of(OpenFolder(below).open(STATE_NAME, os.O_RDWR | os.O_CREAT))
        if flock(use.number):
            _remove_old(below)
        flock(use.number, is_shared=True, patience=math.inf)
        with contextlib.suppress(FileNotFoundError):  # `cached --clear` may have removed the folder meanwhile
            if os.path.samestat(os.fstat(use.number), (below / STATE_NAME).lstat()):
                return use


def _remove_old(below: Path) -> None:
    """Remove copies that no note (a .json file) names, and temporary files of killed processes."""
    notes = filter(None, map(_read_note, below.glob("*.json")))
    needed = {STATE_NAME, *(f"{note.sha256}{Path(note.name).suffix}" for note in notes)}
    for path in below.iterdir():
        if path.name not in needed and path.suffix not in (".json", ".lock"):
            path.unlink()


def _copy(remote: Remote, name: str, below: Path) -> Path:
    """Return the local copy of the file that the URL has now."""
    key, suffix = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32], Path(name).suffix
    with only_one(below / f"{key}.lock", patience=math.inf):
        size, tag = remote.version(name)
        if size is None:
            raise SourceError(f"{remote.shown}/{name} does not exist, or its server does not say how large it is")
        note = _read_note(below / f"{key}.json")
        if note is not None and tag and (note.name, note.tag, note.bytes) == (name, tag, size):
            path = below / f"{note.sha256}{suffix}"
            if _is_whole(path, note):
                return path
        aside, digest = name_aside(below / key), hashlib.sha256()
        try:
            parts = (remote.part(name, at, min(size, at + _PART)) for at in range(0, size, _PART))
            append_chunks(aside, parts, digest)
            if remote.version(name) != (size, tag):
                raise StoreError(f"{remote.shown}/{name} was replaced while it was copied: run the same command again")
            path = below / f"{digest.hexdigest()}{suffix}"
            rename_durably(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        note = _Note(name, tag or "", size, digest.hexdigest())
        write_atomically(below / f"{key}.json", json.dumps(asdict(note)).encode())
        return path


def _is_whole(path: Path, note: _Note) -> bool:
    try:
        return path.lstat().st_size == note.bytes and sha256_file(path) == note.sha256
    except OSError:
        return False


def _read_note(path: Path) -> _Note | None:
    try:
        content = parse_json(read_file(path))
        note = _Note(**content)
    except (OSError, ValueError, TypeError):
        return None
    is_right = all(isinstance(value, str) for value in (note.name, note.tag, note.sha256))
    return note if is_right and isinstance(note.bytes, int) else None
