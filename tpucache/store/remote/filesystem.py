"""FsspecFolder: the files of a folder in any storage that fsspec supports."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tpucache.errors import DependencyError, UsageError
from tpucache.store.files import name_aside, open_new, read_chunks, rename_durably

#: The schemes of real storage. fsspec has other schemes, too, which compute files or read them by a description.
SCHEMES: Final = (
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
    """A folder that fsspec opens: at `hf://`, `memory://`, `file://`, a path, or another scheme of `SCHEMES`.

    The methods raise whatever the library raises.
    """

    def __init__(self, url: str, describe: Callable[[Exception], str], shown: str) -> None:
        """Open the folder. `shown` is the URL without secrets; `describe` returns an error's text without secrets."""
        *before, last = url.split("::")
        for scheme in [_scheme(last, is_before=False), *(_scheme(part, is_before=True) for part in before)]:
            if not (scheme in SCHEMES or (before and scheme in _THROUGH) or _is_registered(scheme)):
                raise UsageError(
                    f"{shown}: {scheme}:// cannot be read. Give a URL that begins with http, https, "
                    f"{', '.join(SCHEMES)}"
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
            self._is_repository = url.startswith("hf://") and not self._root.startswith("buckets/")
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
        """Return the names of files and folders in the folder; an empty set if it does not exist."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        # A store without folders may list an empty file for the folder itself.
        return {path.rstrip("/").rpartition("/")[2] for path in found if path.strip("/") != self._root.strip("/")}

    def files(self) -> dict[str, int]:
        """Return the sizes of all files at any depth, by their paths relative to the folder."""
        self._fs.invalidate_cache()
        found = self._fs.find(self._root, detail=True)
        start = len(self._root.strip("/")) + 1
        return {path.strip("/")[start:]: int(status["size"] or 0) for path, status in found.items()}

    def version(self, name: str) -> tuple[int | None, str | None]:
        """Return a file's size in bytes, and a text that changes with its content. Each is None if it is unknown."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.info(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        size = found["size"]
        stated = {each: str(found[each]) for each in _VERSIONS if found.get(each) is not None}
        return None if size is None else int(size), str(stated) if stated else None

    def read(self, name: str, most: int) -> bytes | None:
        """Return a small file's bytes; None if it has more than `most` bytes."""
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

    def write(self, name: str, source: Path, advance: Callable[[int], None]) -> None:
        done = 0
        with self._opened(name) as file:
            for chunk in read_chunks(source):
                file.write(chunk)
                done += len(chunk)
                advance(done)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with self._opened(name) as file:
            file.write(data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file, and return True. Returns False if a file with this name and other bytes exists.

        This is atomic on a local disk only.
        """
        if self.local is not None:
            try:
                with (self.local / name).open("xb") as file:
                    file.write(data)
            except FileExistsError:
                return (self.local / name).read_bytes() == data
            return True
        self._fs.invalidate_cache()
        if self._fs.exists(self._path(name)):
            return bool(self._fs.cat_file(self._path(name)) == data)
        self.put(name, data)
        return True

    @property
    def has_commits(self) -> bool:
        """Whether the folder is in a repository of the Hugging Face hub, where commits write files."""
        return self._is_repository

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

        A local file is written under a temporary name first, so the old file stays intact meanwhile: it may be a link
        to the very file whose bytes are copied.
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
