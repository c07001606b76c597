"""Files opened and read, with the advice that too many open files need."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import resource
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, TextIO

from tpucache.errors import NotACacheError, StoreError, UsageError
from tpucache.redact import shown

_CHUNK: Final = 1 << 20
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_ONE_SLASH: Final = re.compile(r":/(?!/)")
#: What copies files from a URL of a scheme.
_COPYING: Final = {
    "gs": "`gcloud storage cp --recursive`",
    "hf": "`hf download`",
    "http": "`curl -LO`",
    "https": "`curl -LO`",
    "s3": "`aws s3 cp --recursive`",
}


class OpenFile:
    """A file open for reading, which closes when nothing refers to it any more."""

    def __init__(self, path: Path) -> None:
        """Open a regular file. Raises OSError, StoreError when too many files are open."""
        try:
            self.number = open_regular(path)
        except OSError as error:
            refuse_too_many_files(error)
            raise

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the interpreter's end the names of modules may be gone; a default argument is still there.
        if hasattr(self, "number"):
            close(self.number)


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


def open_regular(path: str | Path) -> int:
    """Open a regular file for reading, and return its descriptor. Raises OSError.

    Anything else is refused: a pipe would let the reader wait for ever and can be read only once, a device never ends.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            kind = "a pipe" if stat.S_ISFIFO(mode) else "a device"
            reason = f"is {kind}, not a regular file: write what it gives to a file first"
            raise OSError(errno.EINVAL, reason, os.fspath(path))
    except BaseException:
        os.close(number)
        raise
    return number


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, as `open_regular` does. Raises OSError."""
    return os.fdopen(open_regular(path), "rb")


def open_text(path: str | Path, encoding: str = "utf-8", newline: str | None = None) -> TextIO:
    """Open a regular file of text for reading, as `open_regular` does. Raises OSError."""
    return os.fdopen(open_regular(path), encoding=encoding, newline=newline)


def read_file(path: str | Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError."""
    with open_file(path) as file:
        return file.read()


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """Return the text of a regular file. Raises OSError, UnicodeDecodeError."""
    with open_text(path, encoding) as file:
        return file.read()


def check_stored(file: BinaryIO) -> None:
    """Raise ValueError unless a file is a zip archive of stored members, as numpy and torch write theirs.

    So what is read of it is no longer than the file. Raises zipfile.BadZipFile for what is no archive.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if any(each.compress_type != zipfile.ZIP_STORED or each.file_size != each.compress_size for each in members):
        raise ValueError("it has compressed members, and is never written so")
    if sum(each.file_size for each in members) > file.seek(0, os.SEEK_END):
        raise ValueError("its members are longer than the file")
    file.seek(0)


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield a regular file's bytes, 1 MiB at a time. Raises OSError."""
    with open_file(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in read_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def refuse_url(folder: str | Path) -> None:
    """Raise NotACacheError for a URL where a cache's folder belongs, before a system error shows its password."""
    if url := _find_url(folder):
        raise NotACacheError(
            f"{url} is a URL, and a cache is read from a folder: copy it to one first, by "
            "`python -m tpucache fetch URL DIR`"
        )


def check_is_local(path: str | Path) -> None:
    """Raise UsageError for a URL where a path of this machine belongs, of a file or folder that is read or written."""
    if url := _find_url(path):
        copy = _COPYING.get(url.partition(":")[0].lower(), "the tool of its storage")
        raise UsageError(
            f"{url} is a URL, and files are read and written by their paths on this machine: copy what is there to a "
            f"folder first ({copy}) or mount it, and give its path; `python -m tpucache push` brings a finished cache "
            "to a URL"
        )


def _find_url(path: str | Path) -> str | None:
    """Return a URL as it may be shown, with the slashes that a Path has lost; None for the path of a file."""
    text = os.fspath(path)
    if not _URL.match(text) or Path(text).exists():
        return None
    return _ONE_SLASH.sub("://", shown(text), count=1)
