"""Files on disk: opening and reading with clear errors, atomic writing, comparing paths, and reading .npy files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import math
import os
import re
import secrets
import shutil
import stat
import struct
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from tpucache import machine
from tpucache.errors import FormatError, NotACacheError, StoreError, UsageError
from tpucache.machine import FOLDER, READ
from tpucache.text import shown

if TYPE_CHECKING:
    from hashlib import _Hash

#: Bytes per read call when a whole file is read: storage with a high latency needs few, large reads.
CHUNK: Final = 4 << 20
#: The number of bytes that are asked for at once, at most, when a file is opened.
MOST_ASKED: Final = 16 << 20
#: Storage answers late if it needs more seconds for one answer. A local disk needs less.
LATE_SECONDS: Final = 0.002
#: The prefix of the name of a dataset on Kaggle: kaggle:owner/slug.
KAGGLE: Final = "kaggle:"
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_ONE_SLASH: Final = re.compile(r":/(?!/)")
_ZIP_MAGIC: Final = b"PK\x03\x04"
#: The records at the end of a zip archive, in this order: the end record with 64-bit numbers, the locator, which has
#: the offset of the first record, and the end record with 32-bit numbers. Only sizes and offsets are parsed.
_ZIP_END64: Final = struct.Struct("<40x2Q")
_ZIP_LOCATOR: Final = struct.Struct("<4s4xQ4x")
_ZIP_END: Final = struct.Struct("<4s8x2LH")
_ZIP_ENDS: Final = _ZIP_END64.size + _ZIP_LOCATOR.size + _ZIP_END.size

_NPY_MAGIC: Final = b"\x93NUMPY\x01\x00"
#: A header as numpy writes it. It is a Python literal, but it is only matched, never evaluated.
_NPY_HEADER: Final = re.compile(
    r"\{'descr': (?P<descr>'[^'\\]{2,8}'|\[[^]]{0,1000}\]), 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>(?:\d{1,18}, ?)*(?:\d{1,18})?)\), \} *\n"
)
_NUMBERS: Final = re.compile(r"'(\|b1|[|<>=][iuf]1|[<>=][iuf][248])'")
_MAX_DIMENSIONS: Final = 32


class OpenFile:
    """An open file with the descriptor `number`. The file closes when this object is garbage collected."""

    def __init__(self, path: Path) -> None:
        try:
            self.number = open_regular(path)
        except OSError as error:
            refuse_too_many_files(error)
            raise

    @classmethod
    def of(cls, number: int) -> OpenFile:
        file = cls.__new__(cls)
        file.number = number
        return file

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # When the interpreter exits, module globals may be gone already; a default argument is not.
        if hasattr(self, "number"):
            close(self.number)


class OpenFolder(OpenFile):
    """An open folder into which other users may be able to write: links in the folder are not followed."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, (FOLDER or os.O_RDONLY) | os.O_NOFOLLOW)
        self.path = path

    def open(self, name: str, flags: int) -> int:
        """Open a regular file in the folder by the flags of `os.open`, and return its descriptor.

        A file that is opened for writing must not have a second name (hard link): it may be another user's file.
        """
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        number = os.open(name, flags, 0o644, dir_fd=self.number)
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or (flags & os.O_ACCMODE != os.O_RDONLY and found.st_nlink > 1):
            os.close(number)
            reason = "is not a regular file, or has a second name (hard link): remove it"
            raise OSError(errno.EINVAL, reason, str(self.path / name))
        return number


def is_late(seconds: float) -> bool:
    """Return whether storage that takes `seconds` for one answer is slow (above 2 ms), so that reading ahead pays."""
    return seconds > LATE_SECONDS


def refuse_too_many_files(error: BaseException) -> None:
    """Raise StoreError if `error` says that too many files are open: then no file is damaged. Else do nothing."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return
    raise StoreError(
        f"{error.filename or 'a file'} cannot be opened, though it is not damaged: too many files are open. Raise the "
        "limit (`ulimit -n`), or close datasets that are no longer used (`dataset.close()`)"
    ) from error


def open_regular(path: str | Path) -> int:
    """Open a regular file for reading and return its descriptor.

    A pipe could block the reader forever and can be read only once; a device may never end.
    """
    return _open_regular(path)[0]


def _open_regular(path: str | Path) -> tuple[int, int]:
    number = os.open(path, READ)
    try:
        status = os.fstat(number)
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            kind = "a pipe" if stat.S_ISFIFO(mode) else "a device"
            reason = f"is {kind}, not a regular file: write its contents to a file first"
            raise OSError(errno.EINVAL, reason, os.fspath(path))
    except BaseException:
        os.close(number)
        raise
    return number, status.st_size


def open_file(path: str | Path, buffer: int = io.DEFAULT_BUFFER_SIZE) -> BinaryIO:
    return os.fdopen(open_regular(path), "rb", buffer)


def ask_for(number: int, offset: int, length: int) -> None:
    """Ask the kernel to read `length` bytes of an open file ahead, from `offset` on, but at most 16 MiB.

    Errors are ignored: some file systems take no hints. Without a hint, the kernel asks storage for a small part at a
    time, and each is waited for.
    """
    with contextlib.suppress(OSError):
        machine.read_ahead(number, offset, min(length, MOST_ASKED))


def open_text(path: str | Path, encoding: str = "utf-8", newline: str | None = None) -> TextIO:
    return os.fdopen(open_regular(path), encoding=encoding, newline=newline)


def read_file(path: str | Path, most: float = math.inf) -> bytes:
    """Return the bytes of a regular file. Raises OSError, before it reads them, if there are more than `most`."""
    number, size = _open_regular(path)
    try:
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read", os.fspath(path))
        # One byte more than the file's size: a shorter answer is its end, so that one system call suffices. While
        # other threads want the interpreter's lock, each call costs a change of threads.
        parts = [os.read(number, size + 1)]
        while parts[-1] and size != sum(map(len, parts)) <= most:
            parts.append(os.read(number, CHUNK))
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(number)


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    with open_text(path, encoding) as file:
        return file.read()


def check_stored(file: BinaryIO) -> None:
    """Raise ValueError unless a file is a zip archive of uncompressed members, such as numpy and torch write.

    Reading it then needs no more memory than its size, and numpy and torch do not take it for another format.
    """
    file.seek(0)
    if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
        raise zipfile.BadZipFile("its first bytes are not those of a zip archive")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if not _has_one_directory(file):
        raise ValueError("its list of members is not where its end record says: no program writes such a zip archive")
    if any(each.compress_type != zipfile.ZIP_STORED or each.file_size != each.compress_size for each in members):
        raise ValueError("it has compressed members, which neither torch.save nor numpy.savez writes")
    if sum(each.file_size for each in members) > file.seek(0, os.SEEK_END):
        raise ValueError("its members are longer than the file")
    file.seek(0)


def _has_one_directory(file: BinaryIO) -> bool:
    """Return whether Python and torch find the same list of members in a zip archive.

    torch reads it at the offset that the end record states, Python right before the end record.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _ZIP_ENDS))
    ends = file.read().rjust(_ZIP_ENDS, b"\0")
    magic, length, start, comment = _ZIP_END.unpack_from(ends, _ZIP_ENDS - _ZIP_END.size)
    at = size - _ZIP_END.size
    locator, place = _ZIP_LOCATOR.unpack_from(ends, _ZIP_END64.size)
    if locator == b"PK\6\7":
        at = size - _ZIP_ENDS
        if place != at:
            return False
        length, start = _ZIP_END64.unpack_from(ends)
    return bool(magic == b"PK\5\6" and not comment and start + length == at)


def read_chunks(path: Path) -> Iterator[bytes]:
    with open_file(path) as file:
        while chunk := file.read(CHUNK):
            yield chunk


def sha256_file(path: Path) -> str:
    return sha256_of(read_chunks(path))


def sha256_of(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def refuse_url(folder: str | Path) -> None:
    """Raise NotACacheError if `folder` is a URL. The message shows the URL without its password."""
    if url := _find_url(folder):
        raise NotACacheError(
            f"{url} is a URL, and a cache is read from a folder: copy the cache first, by `tpucache fetch URL FOLDER`"
        )


def check_is_local(path: str | Path) -> None:
    if url := _find_url(path):
        raise UsageError(
            f"{url} is a URL, and files are read and written by their paths on this machine: copy the files at the URL "
            f"to a folder first, and give the folder's path; `tpucache push` brings a finished cache to a URL"
        )


def is_url(path: str | Path) -> bool:
    """Return whether a text is a URL; False if it is the path of a file on this machine."""
    return _find_url(path) is not None


def is_kaggle(place: str | Path) -> bool:
    """Return whether a text names a dataset on Kaggle (kaggle:owner/slug); False if it is the path of a file here."""
    return os.fspath(place).startswith(KAGGLE) and not Path(place).exists()


def as_url(path: str | Path) -> str:
    """Return a URL as text. If it was made into a `Path`, which turns "://" into ":/", "://" is restored."""
    return _ONE_SLASH.sub("://", os.fspath(path), count=1)


def _find_url(path: str | Path) -> str | None:
    """Return a URL as text without secrets; None if `path` is no URL, or is the path of an existing file."""
    text = os.fspath(path)
    if not _URL.match(text) or Path(text).exists():
        return None
    return _ONE_SLASH.sub("://", shown(text), count=1)


@contextlib.contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    """Add the file's path to an OSError: the system names no file in an error of writing to an open file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # else the system did not raise it
            error.filename = error.filename or os.fspath(path)
        raise


def write_atomically(path: Path, data: bytes, aside: Path | None = None, mode: int = 0o666) -> None:
    """Write `data` to `path` atomically: afterwards the file has either its old contents or all of `data`.

    `aside` is the temporary file on the same file system that is written first.
    """
    aside = aside or name_aside(path)
    try:
        with naming_file(path), open_new(aside, mode) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def name_aside(path: Path) -> Path:
    """Return a temporary path in the same folder. The name is random, so that no other user can have put a link
    there.
    """
    return path.with_name(f".{path.name}.{secrets.randbits(64)}.tmp")


def open_new(path: Path, mode: int = 0o666) -> BinaryIO:
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")


def rename_durably(source: Path, target: Path) -> None:
    source.replace(target)
    sync_directory(target.parent)


def link_or_copy(source: Path, target: Path, aside: Path) -> bool:
    """Give the file `source` the second name `target` by a hard link, or copy it if it cannot be linked.

    Returns whether it is a link. A copy is written to `aside`, on the same file system, and renamed.
    """
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        try:
            aside.unlink(missing_ok=True)
            shutil.copyfile(source, aside, follow_symlinks=True)
            sync_file(aside)
            rename_durably(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        return False
    return True


def sync_file(path: Path) -> None:
    """Write a file's data from the page cache to the disk, so that they survive a power cut."""
    descriptor = os.open(path, READ)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, FOLDER)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_chunks(path: Path, chunks: Iterable[bytes], digest: _Hash) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_BINARY"))
    with naming_file(path), open(path, "ab", opener=lambda name, _: os.open(name, flags, 0o666)) as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())


def check_apart(source: Path, target: Path) -> None:
    """Raise UsageError if the cache `source` and the folder `target` are the same folder, or one contains the other.

    Links, relative paths and repeated mounts are resolved; the folders need not exist.
    """
    real_source, real_target = _resolve(source), _resolve(target)
    if _is_same(real_source, real_target):
        raise UsageError(f"{target} is the cache itself: give another folder")
    if any(_is_same(real_source, parent) for parent in real_target.parents):
        raise UsageError(f"{target} is inside the cache {source}: give a folder outside of it")
    if any(_is_same(real_target, parent) for parent in real_source.parents):
        raise UsageError(f"the cache {source} is inside {target}: give a folder that does not contain the cache")


def is_same_folder(one: Path, other: Path) -> bool:
    return _is_same(_resolve(one), _resolve(other))


def _resolve(path: Path) -> Path:
    try:
        resolved = path.expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{path} cannot be resolved: {error}") from error
    # Up to Python 3.12 resolving a loop of links raises; later it leaves the link in the path.
    if any(each.is_symlink() for each in (resolved, *resolved.parents)):
        raise UsageError(f"{path} cannot be resolved: its links form a loop")
    return resolved


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one == other or one.samefile(other)
    except OSError:  # one of them does not exist
        return False


class ThreadLock:
    """A lock for the threads of one process that is safe after a fork: `with lock: ...`.

    A forked child would inherit a locked ordinary lock, but not the thread that unlocks it. So this has one lock for
    each process. The fork may happen inside the block, so the guarded data must be valid after each single statement.
    """

    def __init__(self) -> None:
        self._by_process: dict[int, threading.Lock] = {}

    def __enter__(self) -> None:
        self._by_process.setdefault(os.getpid(), threading.Lock()).acquire()

    def __exit__(self, *_: object) -> None:
        self._by_process[os.getpid()].release()


class NpyHeader(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


def read_npy_header(file: BinaryIO, rows: np.dtype[Any] | None = None) -> NpyHeader:
    start = file.read(len(_NPY_MAGIC) + 2)
    length = int.from_bytes(start[len(_NPY_MAGIC) :], "little")
    text = file.read(length).decode("latin-1")
    found = _NPY_HEADER.fullmatch(text)
    if not start.startswith(_NPY_MAGIC) or len(text) != length or found is None:
        raise FormatError("it has no header of a .npy file of version 1.0")
    shape = tuple(int(side) for side in re.findall(r"\d+", found["shape"]))
    if len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"an array cannot have {len(shape)} dimensions")
    if found["fortran"] == "True" and len(shape) > 1:
        raise FormatError("the array is in Fortran order")
    text, numbers = found["descr"], _NUMBERS.fullmatch(found["descr"])
    if rows is not None and text == repr(rows.descr):
        return NpyHeader(rows, shape, len(start) + length)
    if numbers is None or "f1" in text:
        raise FormatError(f"it does not hold plain numbers, but {text:.100}")
    return NpyHeader(np.dtype(numbers[1]), shape, len(start) + length)


def parse_npy(data: bytes) -> npt.NDArray[Any]:
    """Return the array in the bytes of a .npy file, read-only."""
    header = read_npy_header(io.BytesIO(data))
    if math.prod(header.shape) * header.dtype.itemsize != len(data) - header.offset:
        raise FormatError(f"{len(data) - header.offset} bytes are not an array of {header.dtype} {header.shape}")
    try:
        return np.frombuffer(data, header.dtype, offset=header.offset).reshape(header.shape)
    except (ValueError, OverflowError) as error:  # an empty array may still have a side that numpy cannot represent
        raise FormatError(f"an array cannot have shape {header.shape}") from error
