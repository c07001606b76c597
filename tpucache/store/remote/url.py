"""Remote: a folder at a URL: on a web server, in an object store, or in any storage that fsspec supports."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from tpucache.errors import DependencyError, FormatError, NotACacheError, StoreError, UsageError, redact
from tpucache.store.files import name_aside, open_new, read_chunks, read_file, rename_durably
from tpucache.store.format import MANIFEST_NAME, MAX_MANIFEST_BYTES
from tpucache.store.manifest import Manifest
from tpucache.store.remote import objects
from tpucache.store.remote.http import SCHEMES, HttpError, HttpFolder
from tpucache.store.remote.objects import ObjectFolder
from tpucache.store.remote.retry import PATIENT_SECONDS, Tries
from tpucache.text import shown, url_secrets

#: The schemes of real storage. fsspec has other schemes, too, which compute files or read them by a description.
STORES: Final = (
    *("file", "local", "memory", "s3", "s3a", "gs", "gcs", "hf", "az", "abfs", "adl", "oss", "oci", "tos"),
    *("hdfs", "webhdfs", "sftp", "ssh", "smb", "ftp", "webdav", "dbfs", "lakefs"),
)
_THROUGH: Final = ("simplecache", "filecache", "blockcache", "dir")  # wrappers: each stands before `::` and another URL
_CHUNK: Final = 8 << 20
#: The names under which libraries state a file's digest, version or exact time. Times in whole seconds are too coarse.
_VERSIONS: Final = (
    "ETag",
    "etag",
    "e_tag",
    "md5Hash",
    "md5",
    "crc32c",
    "generation",
    "versionId",
    "blob_id",
    "created",
)


class FsspecFolder:
    """A folder that fsspec opens: at `hf://`, `memory://`, `file://`, a path, or another scheme of `STORES`.

    The methods raise whatever the library raises.
    """

    def __init__(self, url: str, describe: Callable[[Exception], str], shown: str) -> None:
        """Open the folder. `shown` is the URL without secrets; `describe` returns an error's text without secrets."""
        *before, last = url.split("::")
        for scheme in [_scheme(last, is_before=False), *(_scheme(part, is_before=True) for part in before)]:
            if not (scheme in STORES or (before and scheme in _THROUGH) or _is_registered(scheme)):
                raise UsageError(
                    f"{shown}: {scheme}:// cannot be read. Give a URL that begins with http, https, {', '.join(STORES)}"
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
            #: Whether the folder is in a repository of the Hugging Face hub, where commits write files.
            self.has_commits = url.startswith("hf://") and not self._root.startswith("buckets/")
            return
        # Raised outside the handler: otherwise it is chained to the original error, whose text may contain a password.
        if isinstance(failure, ImportError):
            raise DependencyError(f"{url.partition('://')[0]}:// needs a library of its own: {describe(failure)}")
        raise UsageError(f"{shown} cannot be opened: {describe(failure)}. Give the URL of a folder")

    @property
    def local(self) -> Path | None:
        """The local folder to which the URL leads, also through fsspec's wrappers; None if it is not local."""
        from fsspec.implementations.cached import CachingFileSystem
        from fsspec.implementations.dirfs import DirFileSystem
        from fsspec.implementations.local import LocalFileSystem

        files, root = self._fs, self._root
        while isinstance(files, (CachingFileSystem, DirFileSystem)):
            root = files._join(root) if isinstance(files, DirFileSystem) else root
            files = files.fs
        return Path(root or "/") if isinstance(files, LocalFileSystem) else None

    def names(self) -> set[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        # A store without folders may list an empty file for the folder itself.
        return {path.rstrip("/").rpartition("/")[2] for path in found if path.strip("/") != self._root.strip("/")}

    def files(self) -> dict[str, int]:
        self._fs.invalidate_cache()
        found = self._fs.find(self._root, detail=True)
        start = len(self._root.strip("/")) + 1
        return {path.strip("/")[start:]: int(status["size"] or 0) for path, status in found.items()}

    def version(self, name: str) -> tuple[int | None, str | None]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.info(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        size = found["size"]
        stated = {each: str(found[each]) for each in _VERSIONS if found.get(each) is not None}
        return None if size is None else int(size), str(stated) if stated else None

    def read(self, name: str, most: int) -> bytes | None:
        data = bytearray()
        with self._fs.open(self._path(name), "rb") as file:
            while len(data) <= most and (chunk := file.read(_CHUNK)):
                data += chunk
        return bytes(data) if len(data) <= most else None

    def part(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        data = self._fs.cat_file(self._path(name), start=start, end=stop)
        if len(data) != stop - start:
            raise EOFError(f"{len(data):,} bytes came instead of {stop - start:,}")
        yield data

    def read_into(self, name: str, start: int, target: memoryview, size: int) -> None:
        for data in self.part(name, start, start + len(target)):
            target[:] = data

    def write(self, name: str, source: Path | bytes, advance: Callable[[int], None]) -> None:
        done = 0
        with self._opened(name) as file:
            for chunk in [source] if isinstance(source, bytes) else read_chunks(source):
                file.write(chunk)
                done += len(chunk)
                advance(done)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file, and return True. Returns False if a file with this name and other bytes exists.

        This is atomic on a local disk only.
        """
        if self.local is not None:
            try:
                with (self.local / name).open("xb") as file:
                    file.write(data)
            except FileExistsError:
                return read_file(self.local / name, len(data)) == data
            return True
        self._fs.invalidate_cache()
        if self._fs.exists(self._path(name)):
            return bool(self._fs.cat_file(self._path(name)) == data)
        self.write(name, data, lambda done: None)
        return True

    def commit(self, files: Mapping[str, Path | bytes], remove: Sequence[str]) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        place = self._fs.resolve_path(self._root)
        folder = f"{place.path_in_repo}/" if place.path_in_repo else ""
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(f"{folder}{name}", data) for name, data in files.items()
        ]
        operations += [CommitOperationDelete(f"{folder}{name}") for name in remove]
        HfApi(endpoint=self._fs.endpoint, token=self._fs.token).create_commit(
            place.repo_id,
            operations,
            commit_message=f"tpucache: {', '.join([*files, *remove])[:100]}",
            repo_type=place.repo_type,
            revision=place.revision,
        )
        self._fs.invalidate_cache()

    def remove(self, name: str) -> None:
        self._fs.rm_file(self._path(name))

    def make_folder(self) -> None:
        self._fs.makedirs(self._root, exist_ok=True)

    def close(self) -> None:
        """Do nothing: fsspec keeps its connections."""

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """Open a file for writing.

        A local file is written under a temporary name first: the old one may be a link to the very file whose bytes are
        copied.
        """
        local = self.local
        if local is None:
            with self._fs.open(self._path(name), "wb") as file:
                yield file
            return
        aside = name_aside(local / name)
        try:
            with open_new(aside) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            rename_durably(aside, local / name)
        finally:
            aside.unlink(missing_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _is_registered(scheme: str) -> bool:
    """Return whether the user's program has registered a filesystem for this scheme with fsspec."""
    module = sys.modules.get("fsspec.registry")
    return module is not None and scheme in module.registry and scheme not in module.known_implementations


def _scheme(part: str, *, is_before: bool) -> str:
    """Return the scheme of one part of a URL whose parts are divided by `::`. The scheme of a path is `file`."""
    name, divider, _ = part.partition("://")
    return name.lower() if divider or (is_before and name.isalpha()) else "file"


T = TypeVar("T")

_log: Final = logging.getLogger("tpucache")
_MOST_TEXT: Final = 500  # characters of a library's error, which may quote a whole answer
#: The characters that end a URL's path for the libraries of each scheme. A web server's URL may have a query.
_MARKS: Final = {**dict.fromkeys(SCHEMES, "#"), **dict.fromkeys(("s3", "s3a", "gs", "gcs"), "#?")}
#: Texts in the errors of stores for a bucket that does not exist.
_NO_BUCKET: Final = ("NoSuchBucket", "bucket does not exist")
_BLOCK: Final = 1 << 20  # after this many bytes without an error, the count of attempts starts again
#: The files that the Hugging Face hub puts into each repository, by scheme. They are not part of a cache.
OF_REPOSITORIES: Final = {"hf": {".gitattributes", "README.md"}}


class Remote:
    """The folder at a URL: `gs://`, `s3://`, `hf://`, `https://`, `memory://`, `file://`, or a path.

    `HttpFolder` reads web servers, `ObjectFolder` S3 and Google Cloud Storage if obstore is installed, fsspec all other
    storage. After an error, a request is tried again at growing intervals, and raises StoreError in the end. A web
    server can only be read: listing or writing raises UsageError.
    """

    def __init__(self, url: str, silence: float | None = None) -> None:
        """Store the URL; no connection is opened yet.

        A request fails after `silence` seconds without a byte, except through fsspec. If `silence` is given, no attempt
        begins later than 40 seconds after the first, because a reader waits.
        """
        self._secrets, self._patience = url_secrets(url), math.inf if silence is None else PATIENT_SECONDS
        self.shown = shown(url)
        self.scheme = url.partition("://")[0].lower() if "://" in url else "file"
        if mark := next((mark for mark in _MARKS.get(self.scheme, "") if mark in url), ""):
            raise UsageError(
                f"{self.shown} has a {mark}, which ends the path of such a URL: it would lead to another folder. "
                f"Give a URL without {mark}{f', or write {quote(mark)}' if self.scheme in SCHEMES else ''}"
            )
        self._web = HttpFolder(url, min(_BLOCK, _CHUNK), silence) if self.scheme in SCHEMES else None
        self._files = self._web or self._open_store(url, silence)

    def _open_store(self, url: str, silence: float | None) -> FsspecFolder | ObjectFolder:
        inner = next((part for part in url.split("::")[1:] if part.partition("://")[0].lower() in SCHEMES), None)
        if inner is not None:
            raise UsageError(
                f"{self.shown} reads a web server through fsspec, which accepts answers of any size: give the web "
                "server's own URL"
            )
        if self.scheme in objects.SCHEMES and "::" not in url:
            if objects.is_installed():
                return ObjectFolder(url, silence, self.shown)
            _say_slow(self.scheme)
        return FsspecFolder(url, self._clean, self.shown)

    @property
    def is_http(self) -> bool:
        return self._web is not None

    @property
    def local(self) -> Path | None:
        return self._files.local if isinstance(self._files, FsspecFolder) else None

    def names(self) -> set[str]:
        """Return the names of files and folders in the folder; an empty set if it does not exist."""
        return self._retry("", self._writable.names)

    def files(self) -> dict[str, int]:
        """Return the sizes of all files at any depth, by their paths relative to the folder."""
        return self._retry("", self._writable.files)

    def read(self, name: str, limit: int) -> bytes:
        found = self._retry(name, lambda: self._files.read(name, limit))
        if found is None:
            most = "any manifest: give the URL of a cache" if name == MANIFEST_NAME else f"{limit:,} bytes, its limit"
            raise FormatError(f"{self.shown}/{name} is larger than {most}")
        return found

    def read_into(self, name: str, start: int, target: memoryview, size: int) -> None:
        try:
            self._files.read_into(name, start, target, size)
        except (EOFError, HTTPException, FileNotFoundError, HttpError, UsageError):
            raise
        except PermissionError as error:
            raise PermissionError(self._clean(error)) from None
        except Exception as error:  # noqa: BLE001  # a store's library raises whatever it raises
            raise OSError(f"{type(error).__name__}: {self._clean(error)}") from None

    def manifest(self) -> tuple[Manifest, bytes]:
        data = self.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
        try:
            return Manifest.from_json(data), data
        except FormatError as error:
            raise FormatError(f"{self.shown}/{MANIFEST_NAME}: {error}") from error

    def small_file(self, name: str, most: int = MAX_MANIFEST_BYTES) -> bytes | None:
        """Return a small file's bytes; None if there is no file, or its size is not stated."""
        return None if self.size(name) is None else self.read(name, most)

    def chunks(self, name: str, start: int, stop: int) -> Generator[bytes, None, None]:
        at, reached, tries = start, start, Tries(self._patience)
        while at < stop:
            try:
                for data in self._from(name, at, stop):
                    at += len(data)
                    if at - reached >= min(_BLOCK, _CHUNK):
                        reached, tries = at, Tries(self._patience)
                    yield data
            except (StoreError, UsageError):
                raise
            except Exception as error:  # noqa: BLE001  # a store's library raises whatever it raises
                failure = error
            else:
                continue
            self._pause(name, failure, tries)

    def size(self, name: str) -> int | None:
        return self.version(name)[0]

    def version(self, name: str) -> tuple[int | None, str | None]:
        """Return a file's size in bytes, and a text that changes with its content, such as an ETag."""
        return self._retry(name, lambda: self._files.version(name))

    def write(self, name: str, source: Path | bytes, advance: Callable[[int], None] = lambda done: None) -> None:
        """Write a file with the bytes or the local file `source`, calling `advance` with the bytes written so far."""
        self._retry(name, lambda: self._writable.write(name, source, advance))

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file, and return True. Returns False if a file with this name and other bytes exists.

        On a local disk, and in S3 and Google Cloud Storage, only one of several processes gets True. Other stores are
        only asked first whether the file exists.
        """
        return self._retry(name, lambda: self._writable.create(name, data))

    def remove(self, name: str) -> None:
        self._retry(name, lambda: self._writable.remove(name))

    @property
    def is_atomic(self) -> bool:
        return isinstance(self._files, FsspecFolder) and self._files.has_commits

    def send(self, files: Mapping[str, Path | bytes], remove: Sequence[str] = ()) -> None:
        """Write `files`, bytes or paths by name, in their order, then remove the files named in `remove`.

        If `is_atomic`, all changes are one commit.
        """
        if isinstance(self._files, FsspecFolder) and self._files.has_commits:
            if files or remove:
                folder = self._files
                self._retry("", lambda: folder.commit(files, remove))
            return
        for name, data in files.items():
            self.write(name, data)
        for name in remove:
            self.remove(name)

    def make_folder(self) -> None:
        self._retry("", self._writable.make_folder)

    def close(self) -> None:
        self._files.close()

    @property
    def _writable(self) -> FsspecFolder | ObjectFolder:
        if isinstance(self._files, HttpFolder):
            raise UsageError(f"{self.shown} is a web server, which can be read only: give a folder or a bucket")
        return self._files

    def part(self, name: str, start: int, stop: int) -> bytes:
        return self._retry(name, lambda: b"".join(self._files.part(name, start, stop)))

    @functools.cached_property
    def ranged(self) -> bool:
        """Whether files can be read in parts: not every web server supports ranges."""
        if self._web is None:
            return True
        web = self._web
        return self._retry(MANIFEST_NAME, lambda: web.has_parts(MANIFEST_NAME))

    def _from(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        if not self.ranged:
            yield from self._rest(name, start, stop)
            return
        for at in range(start, stop, _CHUNK):
            yield from self._files.part(name, at, min(at + _CHUNK, stop))

    def _rest(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield a file's bytes from `start` to `stop`. The file is read from its beginning, without a range."""
        at = 0
        for chunk in self._web.beginning(name, stop) if self._web is not None else ():
            data = chunk[max(0, start - at) :]
            at += len(chunk)
            if data:
                yield data

    def _retry(self, name: str, call: Callable[[], T]) -> T:
        tries = Tries(self._patience)
        while True:
            try:
                return call()
            except (StoreError, UsageError):
                raise
            except Exception as error:  # noqa: BLE001  # a store's library raises whatever it raises
                failure = error
            self._pause(name, failure, tries)

    def _pause(self, name: str, failure: Exception, tries: Tries) -> None:
        where = f"{self.shown}/{name}".rstrip("/")
        if any(words in str(failure) for words in _NO_BUCKET):
            raise StoreError(f"{self.shown}: there is no such bucket. Check its name, and whose keys are used")
        if isinstance(failure, FileNotFoundError) and name == MANIFEST_NAME:
            raise NotACacheError(f"{self.shown} holds no {MANIFEST_NAME}: give the URL of a cache's folder")
        reason = self._clean(failure) or type(failure).__name__
        if not tries.wait(failure, lambda pause: _log.warning("%s: %s; trying again in %.1f s", where, reason, pause)):
            reason = f"{type(failure).__name__}: {self._clean(failure)}"
            raise StoreError(f"{where}: {reason}. Check the URL and the network, then run the same command again")

    def _clean(self, error: Exception) -> str:
        return " ".join(redact(str(error), self._secrets).split())[:_MOST_TEXT]


@functools.cache
def _say_slow(scheme: str) -> None:
    _log.warning("%s:// is read by fsspec, which is slower than obstore: `pip install obstore`", scheme)
