"""RemoteCache: a cache at a URL, opened. Its tables are copied to this machine; its records are fetched for reading."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from tpucache.errors import DamageError, NotACacheError, StoreError
from tpucache.redact import shown
from tpucache.store.cache import Cache
from tpucache.store.files import OpenFile, OpenFolder, check_locks, read_file, sha256_file, write_atomically
from tpucache.store.format import TIMES_NAME
from tpucache.store.history import earlier_version, one_version, parse_times, split_version
from tpucache.store.index import RecordIndex
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.store.remote.fetching import Fetcher
from tpucache.store.remote.link import Link
from tpucache.store.remote.local import STATE_NAME, LocalCopy
from tpucache.store.remote.pieces import Pieces
from tpucache.store.remote.remote_reader import RemoteReader
from tpucache.store.remote.url_folder import Remote
from tpucache.system import fcntl

#: The environment variable with the folder in which caches at URLs are kept.
DIR_VARIABLE: Final = "TPUCACHE_DIR"

#: What the manifest is called here. With a `manifest.json` it would be a cache, and parts of its shards are missing.
MANIFEST_COPY: Final = "manifest-at-url.json"

#: Below the same folder: a folder for each URL whose files are copied whole, and the file there that says which one.
COPIES: Final = "sources"
URL_NOTE: Final = "url.json"

_URLS: Final = "urls"
_CLEARED: Final = ".cleared-"  # how the name of a folder begins that is being removed
_FRESH_SECONDS: Final = 30.0  # for which a manifest that another process of this machine has read is used again
_PATIENCE: Final = 60.0  # seconds to wait for another process that reads the same file
_IDENTITY: Final = re.compile(r"[0-9a-f]{64}")
#: Seconds without a byte after which a request is given up.
SILENCE_SECONDS: Final = 20.0

_log: Final = logging.getLogger("tpucache")


def default_directory() -> Path:
    """Return the folder in which caches at URLs are kept: TPUCACHE_DIR, or `tpucache` in the user's cache folder."""
    if named := os.environ.get(DIR_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpucache"


class RemoteCache(Cache):
    """A cache at a URL: the manifest is read and the tables are copied once on a machine, records when they are needed.

    `directory` is the folder of this machine where it is kept, named by the manifest's digest: a cache that was built
    anew at the same URL has another one. A pickled copy, or a forked process, asks for no manifest and no table.
    """

    def __init__(self, url: str, directory: Path, manifest: Manifest, most_bytes: int | None) -> None:
        """Take a cache whose manifest and tables are in the folder already."""
        super().__init__(directory, manifest)
        self.url, self.most_bytes = url, most_bytes
        # The reader refers to the tables alone, not to this cache: so its threads and files end with its last user.
        self._tables = _Tables(directory, manifest)
        self._remote_reader: RemoteReader | None = None

    @classmethod
    def open_url(
        cls,
        url: str,
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
        max_age: float | None = None,
        version: int | None = None,
    ) -> RemoteCache:
        """Read a cache's manifest and tables from its URL: three requests, fewer where they are here already.

        The files are kept below `cache_dir` (default: see `default_directory`), at most `cache_bytes` of the shards
        (default: all, or 80 % of the free disk). A manifest that this machine read less than `max_age` seconds ago
        (default: 30) is not asked for again. Where the URL cannot be reached, and this machine has read it before, it
        uses what it has kept, with a warning. `version` is one of the cache's versions, the newest if not given; "@2"
        after the URL names one, too. Raises NotACacheError, FormatError, DamageError, StoreError, UsageError for
        another kind of URL, DependencyError without the library of a store, and on systems other than Linux.
        """
        check_locks("streaming a cache from a URL", of_open_files=True)
        url, named = split_version(url)
        number = one_version(version, named, shown(url))
        below = Path(cache_dir) if cache_dir is not None else default_directory()
        below = below.expanduser().absolute()
        with contextlib.closing(Remote(url, silence=SILENCE_SECONDS)) as remote:
            try:
                directory, manifest = _read_manifest(remote, url, below, _FRESH_SECONDS if max_age is None else max_age)
                if number is not None:
                    directory, manifest = _read_version(remote, manifest, number, below)
                check_own(directory, below)
                with ThreadPoolExecutor(len(manifest.tables), "tpucache-open") as threads:  # each waits for its answer
                    deque(threads.map(functools.partial(_copy_table, remote, directory), manifest.tables), 0)
            except OSError as error:
                raise StoreError(f"{below} cannot be written: {error}. Give another folder as cache_dir") from error
        cache = cls(url, directory, manifest, cache_bytes)
        cache._asked = number
        return cache

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_remote_reader": None}

    def versions(self) -> tuple[list[Manifest], dict[str, str]]:
        """Return the manifests of this version and all before it, and when they were made, from the URL."""
        with contextlib.closing(Remote(self.url, silence=SILENCE_SECONDS)) as remote:
            numbers = range(1, self.manifest.number)
            before = [earlier_version(self.manifest, number, remote.shown, remote.small_file) for number in numbers]
            times = parse_times(remote.small_file(TIMES_NAME))
        return [*before, self.manifest], times

    @property
    def place(self) -> str:
        """The URL, without its secrets, with its version if asked."""
        return shown(self.url) if self._asked is None else f"{shown(self.url)}@{self._asked}"

    @property
    def index(self) -> RecordIndex:
        """Where each record lies."""
        return self._tables.index

    @property
    def reader(self) -> RemoteReader:
        """The reader of records by their rows of the index, which waits until they are here."""
        if self._remote_reader is None:
            make = functools.partial(_make_fetcher, self._tables, self.url, self.most_bytes)
            self._remote_reader = RemoteReader(self._tables, make)
        return self._remote_reader


class _Tables(Cache):
    """The tables of a cache at a URL, in its folder of this machine, where anybody may change them."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_index": None}  # the copy compares the file that it opens

    @property
    def index(self) -> RecordIndex:
        """Where each record lies: all in memory, compared with the manifest. Raises DamageError, FormatError."""
        if self._index is None:
            index = RecordIndex(self.directory, self.manifest)
            if not index.is_right():
                path = self.directory / self.manifest.index.name
                raise DamageError(f"{path} was changed after it was copied: open the URL again")
            self._index = index
        return self._index

    def describe(self, number: int) -> str:
        """Return which sample, in which variant, a row of the index belongs to."""
        place, position = divmod(number % self.rows_a_band, self.manifest.samples)
        return f"{self.samples.paths[position]!r} in variant {self.manifest.variants[place]}"


class KeptCopy(NamedTuple):
    """The local copy of a URL: its folder, its bytes on this disk, and all bytes at the URL.

    It is a cache, or files that were copied whole as a source of a build.
    """

    url: str
    directory: Path
    bytes: int
    total_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**self._asdict(), "directory": str(self.directory)}


def list_kept(cache_dir: str | Path | None = None) -> list[KeptCopy]:
    """Return the local copies below a folder (default: `default_directory`), the largest first."""
    below = (Path(cache_dir) if cache_dir is not None else default_directory()).expanduser()
    urls: dict[str, str] = {}
    for note in sorted(below.glob(f"{_URLS}/*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(read_file(note))
            urls[str(found["identity"])] = str(found["url"])
    kept = []
    for path in sorted(below.glob(f"*/{MANIFEST_COPY}")):
        folder = path.parent
        if _IDENTITY.fullmatch(folder.name) and (known := _known(below, folder.name)):
            size = sum(each.stat().st_blocks * 512 for each in folder.iterdir())
            kept.append(KeptCopy(urls.get(folder.name, "no URL any more"), folder, size, known[1].total_bytes))
    for path in sorted(below.glob(f"{COPIES}/*/{URL_NOTE}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            url = str(json.loads(read_file(path))["url"])
            size = sum(each.stat().st_blocks * 512 for each in path.parent.iterdir())
            kept.append(KeptCopy(url, path.parent, size, size))
    return sorted(kept, key=lambda each: -each.bytes)


def clear_kept(kept: KeptCopy) -> None:
    """Remove a local copy. Raises StoreError where a process uses it, or where it cannot be removed."""
    below = kept.directory.parent
    try:
        folder = OpenFolder(kept.directory)
        state = OpenFile.of(folder.open(STATE_NAME, os.O_RDWR | os.O_CREAT))
        fcntl.flock(state.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed first, so that nobody finds a state without its shards if this is stopped.
        kept.directory.rename(below / f"{_CLEARED}{secrets.token_hex(8)}")
        for each in below.glob(f"{_CLEARED}*"):
            shutil.rmtree(each)
    except BlockingIOError:
        raise StoreError(f"{kept.directory}, of {kept.url}, is in use: end what reads it first") from None
    except OSError as error:
        raise StoreError(f"{kept.directory} cannot be removed: {error}") from error


def _make_fetcher(cache: _Tables, url: str, most_bytes: int | None, pieces: Pieces) -> Fetcher:
    local = LocalCopy(cache.directory, cache.manifest, pieces, most_bytes)
    link = Link(Remote(url, silence=SILENCE_SECONDS), pieces, cache.describe, shown(url))
    return Fetcher(link, local, pieces)


def _read_manifest(remote: Remote, url: str, below: Path, max_age: float) -> tuple[Path, Manifest]:
    """Return the folder of a cache, and its manifest, which one process reads for all of this machine."""
    note = below / _URLS / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.json"
    own_folder(note.parent, below)
    with only_one(note.with_suffix(".lock")):
        known, age = _read_note(note)
        if known is not None and age < max_age and (found := _known(below, known)):
            return found
        try:
            manifest, data = remote.manifest()
        except NotACacheError:
            raise
        except StoreError as error:
            if known is None or not (found := _known(below, known)):
                raise
            _log.warning("%s. What this machine has of it since an earlier time is used", error)
            return found
        directory = own_folder(below / manifest.identity, below)
        if not _known(below, manifest.identity):
            write_atomically(directory / MANIFEST_COPY, data)
        write_atomically(note, json.dumps({"url": shown(url), "identity": manifest.identity}).encode())
    return directory, manifest


def _read_version(remote: Remote, newest: Manifest, number: int, below: Path) -> tuple[Path, Manifest]:
    """Return the folder of a version of a cache, and its manifest. Raises as `earlier_version` does, and OSError."""
    if number < newest.number and (found := _known(below, newest.parents[number - 1])):
        return found
    manifest = earlier_version(newest, number, remote.shown, remote.small_file)
    directory = own_folder(below / manifest.identity, below)
    if not _known(below, manifest.identity):
        write_atomically(directory / MANIFEST_COPY, manifest.text.encode())
    return directory, manifest


def own_folder(directory: Path, below: Path) -> Path:
    """Return a folder, which is made if it is not there. Raises StoreError as `check_own`, and OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    check_own(directory, below)
    return directory


def check_own(directory: Path, below: Path) -> None:
    """Raise StoreError for a link, or a folder of another user, on the way to a folder from one that the user chose.

    Its owner could replace the files that lie there. That of `below` is trusted.
    """
    owners = os.geteuid(), below.stat().st_uid
    for folder in (directory, *directory.parents)[: len(directory.relative_to(below).parts)]:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners:
            raise StoreError(
                f"{folder} is a link, or belongs to another user, who may change what is read: give a folder of your "
                "own in its place"
            )


def _known(below: Path, identity: str) -> tuple[Path, Manifest] | None:
    """Return the folder and the manifest of a cache on this machine, None where there is none."""
    try:
        manifest = Manifest.from_json(read_file(below / identity / MANIFEST_COPY))
    except (OSError, StoreError):
        return None
    return (below / identity, manifest) if manifest.identity == identity else None


def _read_note(note: Path) -> tuple[str | None, float]:
    """Return the identity of the cache that was last seen at a URL, and how many seconds ago.

    A note of another user than this one, or the folder's owner, counts as none.
    """
    try:
        found, below = note.lstat(), note.parent.parent.stat()
        if found.st_uid not in (os.geteuid(), below.st_uid) or found.st_mode & stat.S_IWOTH:
            return None, 0.0
        identity = json.loads(read_file(note))["identity"]
        age = time.time() - found.st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return None, 0.0
    is_right = isinstance(identity, str) and _IDENTITY.fullmatch(identity)
    return (identity, age if age >= 0 else _FRESH_SECONDS) if is_right else (None, 0.0)


def _copy_table(remote: Remote, directory: Path, entry: FileEntry) -> None:
    """Copy a table, unless it is here already. Raises DamageError where it differs from the manifest."""
    path = directory / entry.name
    with only_one(directory / f"{entry.name}.lock"):
        if path.is_file() and path.stat().st_size == entry.bytes and sha256_file(path) == entry.sha256:
            return
        data = remote.read(entry.name, entry.bytes)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise DamageError(
                f"{remote.shown}/{entry.name} is not as the manifest says: the cache was damaged at the URL, or is "
                "being replaced. Open it again in a moment, or push it again"
            )
        write_atomically(path, data)


@contextlib.contextmanager
def only_one(path: Path, patience: float = _PATIENCE) -> Iterator[None]:
    """Let one process after another do this. Raises StoreError where another one takes longer than `patience`."""
    folder = OpenFolder(path.parent)
    number = folder.open(path.name, os.O_RDWR | os.O_CREAT)
    try:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StoreError(f"another process has held {path} for {patience:.0f} s: end it") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(number)
