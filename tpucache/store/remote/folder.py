"""A folder at a URL, on a web server or in a store that fsspec knows, with retries after broken connections."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator
from http.client import InvalidURL
from pathlib import Path
from typing import Any, Final, TypeVar

from tpucache.errors import DependencyError, FormatError, NotACacheError, StoreError, UsageError
from tpucache.redact import redact, shown, url_secrets
from tpucache.store.files import read_chunks, rename_durably
from tpucache.store.format import MANIFEST_NAME, MAX_MANIFEST_BYTES
from tpucache.store.manifest import Manifest
from tpucache.store.remote.http import SCHEMES, HttpFolder

T = TypeVar("T")

_log: Final = logging.getLogger("tpucache")
_CHUNK: Final = 8 << 20
_RETRIES: Final = 6
_MOST_TEXT: Final = 500  # characters of a library's error, which may quote a whole answer
_FIRST_PAUSE: Final = 0.5
_BLOCK: Final = 1 << 20  # a connection that breaks after fewer bytes, again and again, is given up
# Other statuses from 400 to 499 are final: asking again gets the same answer. 408 is "too slow", 429 "too often".
_PASSING: Final = (408, 429)
_FINAL: Final = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ValueError,
    InvalidURL,
)


class Remote:
    """The folder at a URL: `gs://`, `s3://`, `hf://`, `https://`, `memory://`, `file://`, or a path.

    Web servers are asked by `store.remote.http`, which limits each answer; all other places are left to fsspec and its
    libraries. Whatever they raise is tried again, at growing intervals, and is a StoreError in the end.
    """

    def __init__(self, url: str, silence: float | None = None) -> None:
        """Open no connection yet; `silence` is after how many seconds without a byte a web server is given up.

        Raises DependencyError where a library is missing, UsageError for no URL.
        """
        self._secrets = url_secrets(url)
        self.shown = shown(url)
        self.scheme = url.partition("://")[0].lower() if "://" in url else "file"
        self._web = HttpFolder(url, min(_BLOCK, _CHUNK), silence) if self.scheme in SCHEMES else None
        if self._web is None:
            self._open_store(url)

    def _open_store(self, url: str) -> None:
        """Have fsspec open a URL. Raises DependencyError, UsageError."""
        inner = next((part for part in url.split("::")[1:] if part.partition("://")[0].lower() in SCHEMES), None)
        if inner is not None:
            raise UsageError(
                f"{self.shown} reads a web server through another store, without a limit: give its own URL"
            )
        try:
            import fsspec
        except ImportError as error:
            raise DependencyError("reading URLs needs fsspec: `pip install 'fsspec[http]'`") from error
        failure: Exception
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except Exception as error:  # noqa: BLE001  # each library has its own ways to refuse a URL
            failure = error
        else:
            self._root = root.rstrip("/")
            return
        # Raised outside of the handler, which would chain it to an error whose text may hold a password.
        if isinstance(failure, ImportError):
            raise DependencyError(f"{self.scheme}:// needs a library of its own: {self._clean(failure)}")
        raise UsageError(f"{self.shown} cannot be opened: {self._clean(failure)}. Give the URL of a folder")

    @property
    def is_http(self) -> bool:
        """Whether it is a folder on a web server, which can be read only."""
        return self._web is not None

    @property
    def local(self) -> Path | None:
        """The folder of this machine that the URL leads to, through whatever caches; None where there is none."""
        if self._web is not None:
            return None
        from fsspec.implementations.cached import CachingFileSystem
        from fsspec.implementations.dirfs import DirFileSystem
        from fsspec.implementations.local import LocalFileSystem

        files, root = self._fs, self._root
        while isinstance(files, (CachingFileSystem, DirFileSystem)):
            root = files._join(root) if isinstance(files, DirFileSystem) else root
            files = files.fs
        return Path(root or "/") if isinstance(files, LocalFileSystem) else None

    def names(self) -> set[str]:
        """Return the names of all that is here; none where there is no such folder. Raises StoreError."""

        def ask() -> set[str]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._root, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return set()
            # A store without folders may list an empty file for the folder itself.
            return {path.rstrip("/").rpartition("/")[2] for path in found if path.strip("/") != self._root.strip("/")}

        return self._retry("", ask)

    def read(self, name: str, limit: int) -> bytes:
        """Return a small file's bytes. Raises FormatError when there are more than `limit`, StoreError."""

        def ask() -> bytes | None:
            if self._web is not None:
                return self._web.read(name, limit)
            data = bytearray()
            for chunk in self._stream(name):
                data += chunk
                if len(data) > limit:
                    return None
            return bytes(data)

        found = self._retry(name, ask)
        if found is None:
            raise FormatError(f"{self.shown}/{name} is larger than any manifest or claim: give the URL of a cache")
        return found

    def read_into(self, name: str, start: int, target: memoryview, size: int) -> None:
        """Read bytes of a file of `size` bytes from `start` into all of `target`, once.

        Raises ChangedError where it is not the version that was read before, OSError, EOFError, HTTPException.
        """
        if self._web is not None:
            self._web.read_into(name, start, target, size)
            return
        try:
            data = self._fs.cat_file(self._path(name), start=start, end=start + len(target))
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  # a store's library raises whatever it raises
            raise OSError(f"{type(error).__name__}: {self._clean(error)}") from None
        if len(data) != len(target):
            raise EOFError(f"{len(data):,} bytes came instead of {len(target):,}")
        target[:] = data

    def manifest(self) -> tuple[Manifest, bytes]:
        """Return the manifest, validated, and its bytes. Raises NotACacheError, FormatError, StoreError."""
        where = f"{self.shown}/{MANIFEST_NAME}"
        data = self.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
        try:
            return Manifest.from_json(data), data
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from error

    def chunks(self, name: str, start: int, stop: int) -> Generator[bytes, None, None]:
        """Yield a file's bytes from `start` to `stop`, continuing where the connection broke. Raises StoreError."""
        at, failures, reached = start, 0, start
        while at < stop:
            try:
                for data in self._from(name, at, stop):
                    at += len(data)
                    if at - reached >= min(_BLOCK, _CHUNK):
                        reached, failures = at, 0
                    yield data
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001  # a store's library raises whatever it raises
                failure, failures = error, failures + 1
            else:
                continue
            self._pause(name, failure, failures)

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, None where there is no file or no size is stated. Raises StoreError."""

        def ask() -> int | None:
            self._fs.invalidate_cache()
            try:
                size = self._fs.info(self._path(name))["size"]
            except (FileNotFoundError, NotADirectoryError):
                return None
            return None if size is None else int(size)

        return self._retry(name, ask)

    def write(self, name: str, source: Path, advance: Callable[[int], None]) -> None:
        """Copy a file to here; `advance` is called with its bytes done so far. Raises StoreError."""

        def copy() -> None:
            done = 0
            with self._opened(name) as file:
                for chunk in read_chunks(source):
                    file.write(chunk)
                    done += len(chunk)
                    advance(done)

        self._retry(name, copy)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file. Raises StoreError."""

        def write() -> None:
            with self._opened(name) as file:
                file.write(data)

        self._retry(name, write)

    def remove(self, name: str) -> None:
        """Remove a file. Raises StoreError."""
        self._retry(name, lambda: self._fs.rm_file(self._path(name)))

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """Open a file to be written.

        On a disk it is written under another name first: the old file may be a link to the one that is being read.
        """
        local = self.local
        if local is None:
            with self._fs.open(self._path(name), "wb") as file:
                yield file
            return
        aside = local / f".{name}.{os.getpid()}.tmp"
        try:
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            rename_durably(aside, local / name)
        finally:
            aside.unlink(missing_ok=True)

    def make_folder(self) -> None:
        """Make the folder, where the store has folders. Raises StoreError."""
        self._retry("", lambda: self._fs.makedirs(self._root, exist_ok=True))

    def close(self) -> None:
        """Close what is open; the next request opens it again."""
        if self._web is not None:
            self._web.close()

    @functools.cached_property
    def ranged(self) -> bool:
        """Whether parts of files can be asked for: not every web server gives them."""
        if self._web is None:
            return True
        web = self._web
        return self._retry(MANIFEST_NAME, lambda: web.has_parts(MANIFEST_NAME))

    def _from(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        if not self.ranged:
            yield from self._rest(name, start, stop)
            return
        for at in range(start, stop, _CHUNK):
            end = min(at + _CHUNK, stop)
            yield from self._part(name, at, end)

    def _part(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        if self._web is not None:
            yield from self._web.part(name, start, stop)
            return
        data = self._fs.cat_file(self._path(name), start=start, end=stop)
        if len(data) != stop - start:
            raise EOFError(f"{len(data):,} bytes came instead of {stop - start:,}")
        yield data

    def _rest(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield a file's bytes from `start` to `stop` out of one stream, whose beginning is thrown away."""
        at = 0
        for chunk in self._web.beginning(name, stop) if self._web is not None else ():
            data = chunk[max(0, start - at) :]
            at += len(chunk)
            if data:
                yield data

    def _stream(self, name: str) -> Iterator[bytes]:
        with self._fs.open(self._path(name), "rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _retry(self, name: str, call: Callable[[], T]) -> T:
        failures = 0
        while True:
            try:
                return call()
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001  # a store's library raises whatever it raises
                failure, failures = error, failures + 1
            self._pause(name, failure, failures)

    def _pause(self, name: str, failure: Exception, failures: int) -> None:
        """Wait before the next try. Raises StoreError, not chained to what may hold a password, if there is none."""
        where = f"{self.shown}/{name}".rstrip("/")
        if isinstance(failure, FileNotFoundError) and name == MANIFEST_NAME:
            raise NotACacheError(f"{self.shown} holds no {MANIFEST_NAME}: give the URL of a cache's folder")
        if _is_final(failure, failures):
            reason = f"{type(failure).__name__}: {self._clean(failure)}"
            raise StoreError(f"{where}: {reason}. Check the URL and the network, then run the same command again")
        pause = _FIRST_PAUSE * 2 ** (failures - 1)
        reason = self._clean(failure) or type(failure).__name__
        _log.warning("%s: %s; trying again in %.1f s", where, reason, pause)
        time.sleep(pause)

    def _clean(self, error: Exception) -> str:
        return " ".join(redact(str(error), self._secrets).split())[:_MOST_TEXT]


def _is_final(error: Exception, failures: int) -> bool:
    """Return whether asking again would be in vain."""
    status = getattr(error, "status", None)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in _PASSING
    is_final = refused or getattr(error, "is_final", False) or isinstance(error, _FINAL)
    return is_final or failures > _RETRIES
