"""Files that are whole or absent: written aside, synced, renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tpucache.errors import StoreError

if TYPE_CHECKING:
    from hashlib import _Hash

_CHUNK: Final = 1 << 20


class OpenFile:
    """A file open for reading, which closes when nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises OSError, StoreError when too many files are open."""
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            refuse_too_many_files(error)
            raise

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def refuse_too_many_files(error: BaseException) -> None:
    """Raise StoreError when an error says that no more files can be opened: nothing is wrong with the file."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return
    if error.errno == errno.ENFILE:
        advice = "the whole machine has as many files open as it allows (sysctl fs.file-max): end what else runs"
    else:
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        advice = (
            f"this process may open {limit:,} files and has as many open: raise the limit (`ulimit -n {most}`, at most "
            f"{most:,} here), or close datasets that are no longer used (`dataset.close()`)"
        )
    raise StoreError(f"{error.filename or 'a file'} cannot be opened, though it is not damaged: {advice}") from error


def write_atomically(path: Path, data: bytes, aside: Path | None = None) -> None:
    """Write `data` to `path` so that the path holds either what it held before or all of `data`.

    `aside` is where the bytes are gathered first (default: beside `path`); it must be on the same filesystem.
    Raises OSError.
    """
    aside = aside or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def rename_durably(source: Path, target: Path) -> None:
    """Rename a synced file and sync the directory that now names it."""
    source.replace(target)
    sync_directory(target.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, 1 MiB at a time."""
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def append_chunks(path: Path, chunks: Iterable[bytes], digest: _Hash) -> None:
    """Write bytes to the end of a file and into a digest, and sync the file; what came before an error stays."""
    with path.open("ab") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()
