"""RemoteCache: an open cache at a URL, and copies of whole files at a URL, in folders of this machine.

A cache's tables are copied, its records are fetched when needed. Other files are copied whole, for formats that cannot
be read in parts. A copy's name is its SHA-256; a note has the version that the store stated (such as an ETag), as long
as which the copy is used again. Nothing is removed while a process uses a folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tpucache.errors import DamageError, NotACacheError, SourceError, StoreError, UsageError
from tpucache.store.ahead import Threads
from tpucache.store.cache import Cache
from tpucache.store.files import (
    OpenFile,
    OpenFolder,
    append_chunks,
    check_is_local,
    name_aside,
    read_file,
    rename_durably,
    sha256_file,
    write_atomically,
)
from tpucache.store.format import MAX_MANIFEST_BYTES, TIMES_NAME
from tpucache.store.history import earlier_version, one_version, parse_times, split_version
from tpucache.store.index import RecordIndex
from tpucache.store.lock import check_locks, flock, only_one
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.store.remote.fetch import Fetcher, Link
from tpucache.store.remote.local import STATE_NAME, LocalCopy, Pieces
from tpucache.store.remote.reader import RemoteReader
from tpucache.store.remote.url import Remote
from tpucache.text import parse_json, shown

#: The environment variable that names the folder for local copies of caches at URLs.
DIR_VARIABLE: Final = "TPUCACHE_DIR"

#: The file name of the manifest in a local copy. A `manifest.json` would make the folder look like a complete cache.
MANIFEST_COPY: Final = "manifest-at-url.json"

#: The subfolder for copies of whole files: it has one folder for each URL.
COPIES: Final = "sources"
#: The file, in each of these folders, that has the URL.
URL_NOTE: Final = "url.json"

_URLS: Final = "urls"
_CLEARED: Final = ".cleared-"  # the prefix of folders that are being removed
_FRESH_SECONDS: Final = 30.0  # a manifest that this machine read less than this long ago is used again
_PATIENCE: Final = 60.0  # seconds to wait for another process that reads the same file
_MOST_NOTE: Final = 1 << 20  # bytes
_IDENTITY: Final = re.compile(r"[0-9a-f]{64}")
#: A request fails after this many seconds without a byte.
SILENCE_SECONDS: Final = 20.0

_log: Final = logging.getLogger("tpucache")


def cache_directory(given: str | Path | None = None) -> Path:
    """Return the folder for local copies: `given`, TPUCACHE_DIR, or `tpucache` in the user's cache folder."""
    named = os.environ.get(DIR_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tpucache")
    found = named if given is None else given
    check_is_local(found)
    try:
        return Path(found).expanduser().absolute()
    except RuntimeError as error:  # in a container
        raise UsageError(f"there is no home folder for {found}: set {DIR_VARIABLE} to a folder, or give one") from error


class RemoteCache(Cache):
    """A cache at a URL. Each machine reads the manifest and copies the tables once, and fetches records when needed.

    `directory` is the local folder with the copies. Its name is the manifest's identity, so a cache that is rebuilt at
    the same URL gets another folder.
    """

    def __init__(self, url: str, directory: Path, manifest: Manifest, most_bytes: int | None) -> None:
        super().__init__(directory, manifest)
        self.url, self.most_bytes = url, most_bytes
        # The reader refers to the tables, not to this object: no reference cycle keeps its threads and files alive.
        self._tables = _Tables(directory, manifest)
        self._remote_reader: RemoteReader | None = None

    @classmethod
    def open_url(
        cls,
        url: str,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
        max_age: float = _FRESH_SECONDS,
        version: int | None = None,
    ) -> RemoteCache:
        """Read a cache's manifest and tables from its URL by three requests, or fewer if this machine has copies.

        Copies are kept below `cache_dir` (default: `cache_directory()`), with at most `cache_bytes` of shards
        (default: 80 % of the free disk). A manifest that this machine read less than `max_age` seconds ago is not read
        again. If the URL cannot be reached, an older copy is used, with a warning. `version` is the
        version to open, by default the newest; "@2" after the URL names version 2, too.
        """
        check_locks("streaming a cache from a URL")
        url, named = split_version(url)
        number = one_version(version, named, shown(url))
        below = cache_directory(cache_dir)
        with contextlib.closing(Remote(url, silence=SILENCE_SECONDS)) as remote:
            try:
                directory, manifest = _read_manifest(remote, url, below, max_age)
                if number is not None:
                    directory, manifest = _read_version(remote, manifest, number, below)
                check_own(directory, below)
                with Threads(len(manifest.tables), "tpucache-open") as threads:
                    deque(threads.map(functools.partial(_copy_table, remote, directory), manifest.tables), 0)
            except OSError as error:
                raise StoreError(f"{below} cannot be written: {error}. Give another folder as cache_dir") from error
        cache = cls(url, directory, manifest, cache_bytes)
        LocalCopy(directory, Pieces(cache), cache_bytes)  # makes its file, for which the disk may have no room later
        cache._asked = number
        return cache

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_remote_reader": None}

    def versions(self) -> tuple[list[Manifest], dict[str, str]]:
        with contextlib.closing(Remote(self.url, silence=SILENCE_SECONDS)) as remote:
            numbers = range(1, self.manifest.number)
            before = [earlier_version(self.manifest, number, remote.shown, remote.small_file) for number in numbers]
            times = parse_times(remote.small_file(TIMES_NAME))
        return [*before, self.manifest], times

    @property
    def place(self) -> str:
        return shown(self.url) if self._asked is None else f"{shown(self.url)}@{self._asked}"

    @property
    def index(self) -> RecordIndex:
        return self._tables.index

    @property
    def reader(self) -> RemoteReader:
        if self._remote_reader is None:
            make = functools.partial(_make_fetcher, self._tables, self.url, self.most_bytes)
            self._remote_reader = RemoteReader(self._tables, make)
        return self._remote_reader


class _Tables(Cache):
    """The local tables of a cache at a URL. Other programs may change them."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}  # the copy opens the file and verifies it again

    @property
    def index(self) -> RecordIndex:
        if self._index is None:
            index = RecordIndex(self.directory, self.manifest)
            if not index.is_right():
                path = self.directory / self.manifest.index.name
                raise DamageError(f"{path} was changed after it was copied: open the URL again")
            self._index = index
        return self._index

    def describe(self, number: int) -> str:
        """Return the sample's path and the variant of the record with index row `number`, as text for messages."""
        place, position = divmod(number, self.manifest.samples)
        return f"{self.samples.paths[position]!r} in variant {self.manifest.variants[place]}"


class KeptCopy(NamedTuple):
    """A local copy of a cache at a URL, or of whole files at a URL that are the source of a build.

    The copy takes `bytes` on disk, of `total_bytes` at the URL.
    """

    url: str
    directory: Path
    bytes: int
    total_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "directory": str(self.directory)}


def list_kept(cache_dir: str | Path | None = None) -> list[KeptCopy]:
    """Return the local copies of URLs below `cache_dir` (default: `cache_directory()`), the largest first."""
    below = cache_directory(cache_dir)
    notes = map(_read_json, sorted(below.glob(f"{_URLS}/*.json")))
    urls = {str(note.get("identity")): str(note.get("url")) for note in notes}
    kept = []
    for path in sorted(below.glob(f"*/{MANIFEST_COPY}")):
        identity = path.parent.name
        if _IDENTITY.fullmatch(identity) and (found := _local_manifest(below, identity)):
            folder, manifest = found
            url = urls.get(identity, "no URL any more")
            kept.append(KeptCopy(url, folder, disk_bytes(folder), manifest.total_bytes))
    for path in sorted(below.glob(f"{COPIES}/*/{URL_NOTE}")):
        if place := _read_json(path).get("url"):
            size = disk_bytes(path.parent)
            kept.append(KeptCopy(str(place), path.parent, size, size))
    return sorted(kept, key=lambda each: -each.bytes)


def disk_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process has just removed it
            total += path.lstat().st_blocks * 512
    return total


def clear_kept(kept: KeptCopy) -> None:
    below = kept.directory.parent
    try:
        state = OpenFile.of(OpenFolder(kept.directory).open(STATE_NAME, os.O_RDWR | os.O_CREAT))
        if not flock(state.number):
            raise StoreError(
                f"{kept.directory}, the copy of {kept.url}, is in use: end the process that reads it first"
            )
        # Renamed first: if this process is stopped, no other process takes a half-removed copy for a whole one.
        kept.directory.rename(below / f"{_CLEARED}{secrets.token_hex(8)}")
        for each in below.glob(f"{_CLEARED}*"):
            shutil.rmtree(each)
    except OSError as error:
        raise StoreError(f"{kept.directory} cannot be removed: {error}. Check the folder's permissions") from error


def _make_fetcher(cache: _Tables, url: str, most_bytes: int | None, pieces: Pieces) -> Fetcher:
    local = LocalCopy(cache.directory, pieces, most_bytes)
    _log.info("%s: reading version %d, %s", shown(url), cache.manifest.number, cache.directory.name)
    link = Link(Remote(url, silence=SILENCE_SECONDS), pieces, cache.describe, shown(url))
    return Fetcher(link, local, pieces)


def _read_manifest(remote: Remote, url: str, below: Path, max_age: float) -> tuple[Path, Manifest]:
    """Return the local folder and the manifest, read from the URL if no local copy is younger than `max_age` seconds.

    If the URL cannot be read, an older copy is used. One process of this machine at a time reads from the URL.
    """
    note = below / _URLS / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"
    own_folder(note.parent, below)
    with only_one(note.with_suffix(".lock"), _PATIENCE):
        last, age = _read_note(note)
        found = _local_manifest(below, last)
        if found is not None and 0 <= age < max_age:
            return found
        try:
            manifest, data = remote.manifest()
        except NotACacheError:
            raise
        except StoreError as error:
            if found is None:
                raise
            _log.warning("%s. The local copy of the manifest from an earlier time is used", error)
            return found
        kept = _keep(below, manifest, data)
        write_atomically(note, json.dumps({"url": shown(url), "identity": manifest.identity}).encode())
    return kept


def _keep(below: Path, manifest: Manifest, data: bytes) -> tuple[Path, Manifest]:
    directory = own_folder(below / manifest.identity, below)
    if not _local_manifest(below, manifest.identity):
        write_atomically(directory / MANIFEST_COPY, data)
    return directory, manifest


def _read_version(remote: Remote, newest: Manifest, number: int, below: Path) -> tuple[Path, Manifest]:
    if number < newest.number and (found := _local_manifest(below, newest.parents[number - 1])):
        return found
    manifest = earlier_version(newest, number, remote.shown, remote.small_file)
    return _keep(below, manifest, manifest.text.encode())


def own_folder(directory: Path, below: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    check_own(directory, below)
    return directory


def check_own(directory: Path, below: Path) -> None:
    owners = os.geteuid(), below.stat().st_uid
    for folder in (directory, *directory.parents)[: len(directory.relative_to(below).parts)]:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
            raise StoreError(
                f"{folder} is a link, or belongs to another user, who may change the files in it: give a folder of "
                "your own instead"
            )


def _local_manifest(below: Path, identity: str) -> tuple[Path, Manifest] | None:
    try:
        manifest = Manifest.from_json(read_file(below / identity / MANIFEST_COPY, MAX_MANIFEST_BYTES))
    except (OSError, StoreError):
        return None
    return (below / identity, manifest) if manifest.identity == identity else None


def _read_note(note: Path) -> tuple[str, float]:
    """Return the identity of the cache that this machine last saw at a URL, and how many seconds ago.

    Returns ("", 0.0) if the file is missing or invalid, or another user owns it or may write it.
    """
    try:
        found, below = note.lstat(), note.parent.parent.stat()
        if found.st_uid not in (os.geteuid(), below.st_uid) or found.st_mode & stat.S_IWOTH:
            return "", 0.0
        identity, age = str(_read_json(note).get("identity")), time.time() - found.st_mtime
    except OSError:
        return "", 0.0
    return (identity, age) if _IDENTITY.fullmatch(identity) else ("", 0.0)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_file(path, _MOST_NOTE))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _copy_table(remote: Remote, directory: Path, entry: FileEntry) -> None:
    path = directory / entry.name
    with only_one(directory / f"{entry.name}.lock", _PATIENCE):
        if _is_whole(path, entry):
            return
        data = remote.read(entry.name, entry.bytes)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise DamageError(
                f"{remote.shown}/{entry.name} has another SHA-256 than the manifest says: the cache was damaged at the "
                "URL, or is being replaced. Open the URL again in a moment, or push the cache again"
            )
        write_atomically(path, data)


_PART: Final = 8 << 20  # bytes per request
_TOGETHER: Final = 8  # files that are copied at once


@dataclass(frozen=True)
class _Note:
    """What is known of a copied file. `tag` is the version that the store stated, such as an ETag, or ""."""

    name: str
    tag: str
    bytes: int
    sha256: str


class Copies:
    """Copies of files at a URL, by their names in `folder`. While this object exists, they are not removed."""

    def __init__(self, folder: Path, use: OpenFile | None = None) -> None:
        self.folder, self._use = folder, use

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, (self.folder,)


def copy_files(url: str, folder: str, names: Sequence[str], advance: Callable[[int], None]) -> Copies:
    """Copy files from the folder at a URL to this machine. Files that were copied before are only verified."""
    below = cache_directory() / COPIES / hashlib.sha256(url.encode()).hexdigest()[:32]
    for name in names:
        if os.path.normpath(f"x/{name}") != f"x/{name}":
            raise SourceError(f"{shown(folder)} has a file called {name!r}, which no file in a folder can be called")
    try:
        use, copies = _hold(below), dict[str, Path]()
        write_atomically(below / URL_NOTE, json.dumps({"url": shown(url)}).encode())
        with closing(Remote(folder)) as remote, Threads(min(_TOGETHER, len(names)), "tpucache-copy") as threads:
            for name, path in zip(names, threads.map(functools.partial(_copy, remote, below), names), strict=True):
                copies[name] = path
                advance(path.stat().st_size)
        links = below / hashlib.sha256(repr(copies).encode()).hexdigest()
        for name, path in copies.items():
            link = links / name
            link.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                link.symlink_to(os.path.relpath(path, link.parent))
    except OSError as error:
        raise StoreError(
            f"{below} cannot keep copies from {shown(url)}: {error}. Set TPUCACHE_DIR to a folder with enough space"
        ) from error
    return Copies(links, use)


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
    """Remove copies that no note (a .json file) names, links, and temporary files of killed processes."""
    notes = filter(None, map(_read_copied, below.glob("*.json")))
    needed = {STATE_NAME, *(f"{note.sha256}{Path(note.name).suffix}" for note in notes)}
    for path in below.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in needed and path.suffix not in (".json", ".lock"):
            path.unlink()


def _copy(remote: Remote, below: Path, name: str) -> Path:
    key, suffix = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32], Path(name).suffix
    with only_one(below / f"{key}.lock", patience=math.inf):
        size, tag = remote.version(name)
        if size is None:
            raise SourceError(f"{remote.shown}/{name} does not exist, or its server does not say how large it is")
        note = _read_copied(below / f"{key}.json")
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


def _is_whole(path: Path, note: _Note | FileEntry) -> bool:
    try:
        return path.lstat().st_size == note.bytes and sha256_file(path) == note.sha256
    except OSError:
        return False


def _read_copied(path: Path) -> _Note | None:
    try:
        note = _Note(**_read_json(path))
    except TypeError:
        return None
    is_right = all(isinstance(value, str) for value in (note.name, note.tag, note.sha256))
    return note if is_right and isinstance(note.bytes, int) else None
