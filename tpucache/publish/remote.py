"""A folder at a URL that fsspec knows, read and written so that a broken connection is no end."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from tpucache.errors import DependencyError, FormatError, NotACacheError, StoreError, UsageError
from tpucache.store.files import read_chunks
from tpucache.store.format import MANIFEST_NAME, MAX_MANIFEST_BYTES
from tpucache.store.manifest import Manifest

T = TypeVar("T")

_log: Final = logging.getLogger("tpucache")
_CHUNK: Final = 8 << 20
_RETRIES: Final = 6
_FIRST_PAUSE: Final = 0.5
_SILENCE_SECONDS: Final = 60
_HTTP: Final = ("http", "https")
# What asking again does not change. 408 and 429 are HTTP's "too slow" and "too often".
_FINAL: Final = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ValueError,
)
_PASSING: Final = (408, 429)


class Remote:
    """The folder at a URL: `gs://`, `s3://`, `hf://`, `https://`, `memory://`, `file://`, or a path.

    Whatever the store's library raises is tried again, at growing intervals, and is a StoreError in the end.
    """

    def __init__(self, url: str) -> None:
        """Open no connection yet. Raises DependencyError where a library is missing, UsageError for no URL."""
        self.shown = re.sub(r"//[^/@]*@", "//", url)  # without a password
        try:
            import fsspec
        except ImportError as error:
            raise DependencyError("reading URLs needs fsspec: `pip install 'tpucache[remote]'`") from error
        scheme = url.partition("://")[0] if "://" in url else "file"
        self.is_http = scheme in _HTTP
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **(_http_options() if self.is_http else {}))
        except ImportError as error:
            raise DependencyError(f"{scheme}:// needs a library of its own: {error}") from error
        except ValueError as error:
            raise UsageError(f"{self.shown} is no URL that can be opened: {error}") from error
        self._root = root.rstrip("/")

    def manifest(self) -> tuple[Manifest, bytes]:
        """Return the manifest, validated, and its bytes. Raises NotACacheError, FormatError, StoreError."""
        where = f"{self.shown}/{MANIFEST_NAME}"

        def read() -> bytes:
            data = bytearray()
            for chunk in self._stream(MANIFEST_NAME):
                data += chunk
                if len(data) > MAX_MANIFEST_BYTES:
                    raise FormatError(f"{where} is larger than any manifest")
            return bytes(data)

        data = self._retry(MANIFEST_NAME, read)
        try:
            return Manifest.from_json(data), data
        except FormatError as error:
            raise FormatError(f"{where}: {error}") from error

    def chunks(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield a file's bytes from `start` to `stop`, going on where the connection broke. Raises StoreError."""
        at, failures = start, 0
        while at < stop:
            try:
                for data in self._from(name, at, stop):
                    at, failures = at + len(data), 0
                    yield data
            except Exception as error:  # a store's library raises whatever it raises
                failures += 1
                if _is_final(error, failures):
                    raise self._told(name, error) from error
                self._pause(name, error, failures)

    def size(self, name: str) -> int | None:
        """Return a file's bytes, None where there is none, or where a server does not tell. Raises StoreError."""

        def ask() -> int | None:
            self._fs.invalidate_cache()
            try:
                told = self._fs.info(self._path(name))["size"]
            except (FileNotFoundError, NotADirectoryError):
                return None
            return None if told is None else int(told)

        return self._retry(name, ask)

    def write(self, name: str, source: Path, tell: Callable[[int], None]) -> None:
        """Copy a file to here; `tell` is called with its bytes done so far. Raises StoreError."""

        def copy() -> None:
            done = 0
            with self._fs.open(self._path(name), "wb") as file:
                for chunk in read_chunks(source):
                    file.write(chunk)
                    done += len(chunk)
                    tell(done)

        self._retry(name, copy)

    def make_folder(self) -> None:
        """Make the folder, where the store has folders. Raises StoreError."""
        self._retry("", lambda: self._fs.makedirs(self._root, exist_ok=True))

    @functools.cached_property
    def ranged(self) -> bool:
        """Whether parts of files can be asked for: not every web server gives them."""
        if not self.is_http:
            return True
        part = self._retry(MANIFEST_NAME, lambda: self._fs.cat_file(self._path(MANIFEST_NAME), start=0, end=1))
        return len(part) == 1

    def _from(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        if not self.ranged:
            yield from self._rest(name, start, stop)
            return
        for at in range(start, stop, _CHUNK):
            end = min(at + _CHUNK, stop)
            data = self._fs.cat_file(self._path(name), start=at, end=end)
            if len(data) != end - at:
                raise EOFError(f"{len(data):,} bytes came instead of {end - at:,}")
            yield data

    def _rest(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield a file's bytes from `start` to `stop` out of one stream, whose beginning is thrown away."""
        at = 0
        for chunk in self._stream(name):
            data = chunk[max(0, start - at) : stop - at]
            at += len(chunk)
            if data:
                yield data
            if at >= stop:
                return
        raise EOFError(f"it ended after {at:,} bytes of {stop:,}")

    def _stream(self, name: str) -> Iterator[bytes]:
        # block_size 0 is one stream from front to back. A size, any, keeps fsspec from asking for it first: when that
        # fails for whatever reason, it says that there is no such file.
        options = {"block_size": 0, "size": 1} if self.is_http else {}
        with self._fs.open(self._path(name), "rb", **options) as file:
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
            except Exception as error:  # a store's library raises whatever it raises
                failures += 1
                if _is_final(error, failures):
                    raise self._told(name, error) from error
                self._pause(name, error, failures)

    def _told(self, name: str, error: Exception) -> StoreError:
        if isinstance(error, FileNotFoundError) and name == MANIFEST_NAME:
            return NotACacheError(f"{self.shown} holds no {MANIFEST_NAME}: give the URL of a cache's folder")
        return StoreError(f"{self.shown}/{name}: {type(error).__name__}: {error}")

    def _pause(self, name: str, error: Exception, failures: int) -> None:
        pause = _FIRST_PAUSE * 2 ** (failures - 1)
        reason = str(error) or type(error).__name__
        _log.warning("%s/%s: %s; trying again in %.1f s", self.shown, name, reason, pause)
        time.sleep(pause)


def _is_final(error: Exception, failures: int) -> bool:
    """Tell whether asking again would be in vain."""
    status = getattr(error, "status", None)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in _PASSING
    return refused or isinstance(error, _FINAL) or failures > _RETRIES


def _http_options() -> dict[str, Any]:
    """Return options under which a slow download may take as long as it likes, but not fall silent."""
    with contextlib.suppress(ImportError):  # fsspec tells of it by itself
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_SECONDS, sock_read=_SILENCE_SECONDS)
        return {"client_kwargs": {"timeout": timeout}}
    return {}
