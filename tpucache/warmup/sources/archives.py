"""ArchiveFiles: the files in .zip and .tar archives, listed once. Each file is read by the offset of its header.

Nothing is unpacked to disk. A `Member` holds all that a worker needs to read a file.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import posixpath
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Final

from tpucache import machine
from tpucache.errors import SampleError, SourceError
from tpucache.progress import Progress
from tpucache.store.ahead import open_scanned
from tpucache.store.files import OpenFile
from tpucache.warmup.sources.folder import find_shards
from tpucache.warmup.sources.source import Member, cached_until_changed, has_wildcard, split_pattern

_ZIP: Final = ".zip"
#: The suffixes of archives. Compressed ones are listed so that the error can say what they are.
_NAMES: Final = re.compile(r"\.(zip|tar|tgz|tbz2|txz|tar\.(gz|bz2|xz|zst))$", re.IGNORECASE)
#: The most bytes that are read from one file. A file that claims more, such as a zip bomb, is not a photograph.
_LARGEST: Final = 1 << 30

_BLOCK: Final = tarfile.BLOCKSIZE
_READ: Final = 1 << 20
_CHANGED: Final = "is no longer at its place in the archive, which has changed: run warmup again"
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
#: What zipfile and tarfile raise for archives that are damaged or made to do harm.
_BROKEN: Final = (
    zipfile.BadZipFile,
    tarfile.TarError,
    struct.error,
    ValueError,
    IndexError,
    OverflowError,
    EOFError,
    NotImplementedError,
    RecursionError,
)

# Appnote 4.3.7: signature, method, lengths of name and extra.
_HEADER: Final = struct.Struct("<4s4xH16x2H")
_SIGNATURE: Final = b"PK\x03\x04"
#: The most bytes that most programs write after a file's name: they are read together with the file.
_EXTRA_BYTES: Final = 512
_ENCRYPTED: Final = 1
_UTF8: Final = 0x800
#: The most bytes that each method makes out of one. Deflate makes at most 258 bytes out of two bits.
_MOST_EXPANSION: Final = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}


@dataclass(frozen=True)
class ArchiveFiles:
    """The files in the folder `inside` ("": the whole archive) of all archives in `root` that match a pattern."""

    root: Path
    pattern: str
    inside: str = ""

    def __str__(self) -> str:
        return str(self.root / self.pattern / self.inside)

    @property
    def is_several(self) -> bool:
        """Whether the pattern may match several archives, so that names begin with the name of their archive."""
        return has_wildcard(self.pattern) and not (self.root / self.pattern).is_file()

    def list(self) -> dict[str, Member]:
        """Return all files by name: archive by archive, each in its own order.

        Names are relative to `inside`; with several archives, they begin with the archive's path.
        """
        return {name: member for name, member in self.entries().items() if not name.endswith("/")}

    def entries(self, _: Iterable[str] | None = None) -> dict[str, Member]:
        """Return all files and folders by name, as `list` does; the name of a folder ends with a slash."""
        found: dict[str, Member] = {}
        start = f"{self.inside}/" if self.inside else ""
        with Progress(None, "list", "files", is_brief=True) as progress:
            for each in find_shards(self.root, self.pattern):
                path, name = self.root / each, each.as_posix()
                prefix = f"{name}/" if self.is_several else ""
                found |= {
                    prefix + text.removeprefix(start): member
                    for text, member in plain_members(_members(path, name, progress.advance), str(path)).items()
                    if text.startswith(start) and text != start
                }
        if all(name.endswith("/") for name in found):
            raise SourceError(f"{self} holds no files")
        return found

    def read(self, member: Member, path: str) -> bytes:
        """Return a file's content."""
        if member.bytes > _LARGEST:
            raise SampleError(path, f"has {member.bytes:,} bytes: a file in an archive may have at most {_LARGEST:,}")
        archive = self.root / member.archive
        opened = _opened(archive)  # stays open as long as this refers to it
        try:
            read = read_zip if archive.suffix.lower() == _ZIP else read_tar
            return read(functools.partial(os.pread, opened.number), member, path)
        except OSError as error:
            raise SampleError(path, f"cannot be read: {archive}: {error.strerror}") from error


def find_archive(source: str | Path) -> ArchiveFiles | None:
    """Return the files that a path such as `a.zip`, `a.zip/folder` or `part-*.tar` names, or None for other paths."""
    path = Path(source)
    for end in (path, *path.parents):
        if _NAMES.search(end.name) and (end.is_file() or (has_wildcard(str(end)) and not end.exists())):
            return ArchiveFiles(*split_pattern(end), "/".join(path.parts[len(end.parts) :]))
    return None


#: Opens an archive. Samples are read in order, so that those of one moment lie in few archives.
_opened: Final = cached_until_changed(4)(OpenFile)


def plain_members(members: Sequence[Member], where: str) -> dict[str, Member]:
    """Return members by their plain names (without `./`), in order; the name of a folder ends with a slash."""
    found: dict[str, Member] = {}
    for member in sorted(members, key=lambda member: member.name.endswith("/")):  # folders last
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        is_folder = member.name.endswith("/")
        name = "/".join(parts) + ("/" if is_folder else "")
        if ".." in parts or "\0" in name or not name:
            raise SourceError(
                f"{where}: entry {member.name!r} leads out of the archive, which is damaged or made to do harm"
            )
        if name in found and not is_folder:
            raise SourceError(f"{where} has {name!r} more than once: make the archive again, with each file once")
        if parts:
            found[name] = member
    return found


def _members(path: Path, archive: str, advance: Callable[[int], object]) -> list[Member]:
    """Return a Member for each file and folder of an archive; `archive` is its path in the Members.

    The name of a folder ends with a slash. `advance` is called with the number of entries that were read.
    """
    try:
        if path.suffix.lower() != _ZIP:
            with open_scanned(path) as file:
                return _list_tar(file, path, archive, advance)
        opened = _opened(path)
        size = os.fstat(opened.number).st_size
        with zip_file(lambda start, stop: machine.pread(opened.number, stop - start, start), size) as file:
            return list_zip(file, str(path), archive, advance)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error


def _list_tar(file: BinaryIO, path: Path, archive: str, advance: Callable[[int], object]) -> list[Member]:
    """Return the Members of an open tar, in order. A link stands for the file that it names."""
    start = file.read(_BLOCK)
    if kind := next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), ""):
        raise SourceError(
            f"{path} is compressed as a whole ({kind}), so that single files cannot be read: decompress it to a .tar, "
            "or make a .zip of it"
        )
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for entry in tar:
                if tar.offset < entry.offset_data:  # with which some versions of Python loop forever
                    raise tarfile.ReadError(f"the size of {entry.name!r} is negative")
                advance(1)
            entries, end = tar.getmembers(), tar.offset
    except _BROKEN as error:
        raise SourceError(
            f"{path} is not a complete .tar file: {error or type(error).__name__}; copy it again"
        ) from error
    _check_end(file, path, end)
    regular = {posixpath.normpath(entry.name): entry for entry in entries if entry.isreg()}
    return [
        _member(path, archive, entry, regular)
        for entry in entries
        if entry.isreg() or entry.isdir() or entry.islnk() or entry.issym()
    ]


def read_tar(pread: Callable[[int, int], bytes], member: Member, path: str) -> bytes:
    """Return a file's content from a tar by `pread`, as `read_zip` does."""
    whole = pread(_BLOCK + member.bytes, member.offset)
    with contextlib.suppress(tarfile.HeaderError):
        header = tarfile.TarInfo.frombuf(whole[:_BLOCK], "utf-8", "surrogateescape")
        if (header.chksum, len(whole)) == (member.checksum, _BLOCK + member.bytes):
            return whole[_BLOCK:]
    raise SampleError(path, _CHANGED)


def _check_end(file: BinaryIO, path: Path, end: int) -> None:
    """Raise SourceError unless only zeros follow the last file: tarfile mistakes a damaged header for the end."""
    file.seek(end)
    size = 0
    while block := file.read(_READ):
        size += len(block)
        if any(block):
            raise SourceError(
                f"{path} has more data after its end, at offset {end}: it is damaged, or several archives in one. Copy "
                "it again, or give each archive as a file of its own"
            )
    if size < _BLOCK:
        raise SourceError(f"{path} is cut short: it has no end mark; copy it again")


def _member(path: Path, archive: str, entry: tarfile.TarInfo, regular: Mapping[str, tarfile.TarInfo]) -> Member:
    folder = posixpath.dirname(entry.name) if entry.issym() else ""
    is_link = entry.issym() or entry.islnk()
    target = regular.get(posixpath.normpath(posixpath.join(folder, entry.linkname))) if is_link else entry
    if target is None:
        raise SourceError(
            f"{path}: {entry.name!r} is a link to {entry.linkname!r}, which is not in the archive: make "
            "the archive with `tar --dereference`"
        )
    if target.issparse():
        raise SourceError(f"{path}: {entry.name!r} is a sparse file: make the archive without `--sparse`")
    name = f"{entry.name}/" if entry.isdir() else entry.name
    return Member(archive, name, target.offset_data - _BLOCK, target.size, target.size, target.chksum)


class _TailFile(io.BytesIO):
    """The end of a file, from where zipfile has sought so far, and at least the last MiB."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch, self._size, self._start = fetch, size, size
        super().__init__()

    def tell(self) -> int:
        return self._start + super().tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence])
        if at < self._start:
            self._start = min(at, max(0, self._size - _READ))
            super().__init__(self._fetch(self._start, self._size))
        return self._start + super().seek(at - self._start)


def zip_file(fetch: Callable[[int, int], bytes], size: int) -> BinaryIO:
    """Return a file for `list_zip` whose bytes `start` to `stop` are `fetch(start, stop)`; it has `size` bytes."""
    return _TailFile(fetch, size)


def list_zip(opened: IO[bytes], path: str, archive: str, advance: Callable[[int], object]) -> list[Member]:
    """Return the Members of an open zip, in the order of its directory, as `_members` does."""
    try:
        with zipfile.ZipFile(opened) as file:
            entries = file.infolist()
    except _BROKEN as error:
        raise SourceError(f"{path} is not a complete .zip file: {error}. Copy it again") from error
    advance(len(entries))
    for entry in entries:
        if problem := _problem(entry):
            raise SourceError(f"{path}: entry {entry.filename!r} {problem}")
    members = [
        Member(archive, _name(entry), entry.header_offset, entry.file_size, entry.compress_size, entry.CRC)
        for entry in entries
    ]
    ends = sorted((each.offset, each.offset + _HEADER.size + each.packed) for each in members)
    if any(end > start for (_, end), (start, _) in itertools.pairwise(ends)):
        raise SourceError(f"{path}: entries overlap: the archive is damaged, or made to do harm")
    return members


def read_zip(pread: Callable[[int, int], bytes], member: Member, path: str) -> bytes:
    """Return a file's content from a zip. `pread(count, offset)` reads up to `count` bytes of the zip at `offset`.

    One call of `pread` is usually enough.
    """
    found = pread(_HEADER.size + len(member.name.encode()) + _EXTRA_BYTES + member.packed, member.offset)
    if len(found) < _HEADER.size or not found.startswith(_SIGNATURE):
        raise SampleError(path, _CHANGED)
    _, method, name_length, extra_length = _HEADER.unpack_from(found)
    start = _HEADER.size + name_length + extra_length
    if (missing := start + member.packed - len(found)) > 0:
        found += pread(missing, member.offset + len(found))
    data = found[start : start + member.packed]
    if method == zipfile.ZIP_DEFLATED:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.bytes + 1)  # it may be a zip bomb
        except zlib.error as error:
            raise SampleError(path, f"is damaged: {error}") from error
    if len(data) != member.bytes or zlib.crc32(data) != member.checksum:
        raise SampleError(path, "is damaged: it does not match the checksum in its archive")
    return data


def _problem(entry: zipfile.ZipInfo) -> str:
    """Return why an entry cannot be read, as the rest of a sentence, or ""."""
    if "\0" in entry.orig_filename:  # zipfile cuts the name there
        return "has a zero byte in its name: the archive is damaged, or made to do harm"
    if entry.flag_bits & _ENCRYPTED:
        return "is encrypted: unpack it with its password, and zip it without one"
    if entry.compress_type not in _MOST_EXPANSION:
        return f"is compressed by method {entry.compress_type}: only stored and deflated files are read, zip it again"
    if entry.file_size > entry.compress_size * _MOST_EXPANSION[entry.compress_type]:
        return f"claims {entry.file_size:,} bytes, compressed to {entry.compress_size:,}: that is impossible"
    return ""


def _name(entry: zipfile.ZipInfo) -> str:
    name = entry.filename
    if not entry.flag_bits & _UTF8:  # macOS writes UTF-8 without the flag that says so
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode()
    return name if "/" in name else name.replace("\\", "/")  # some programs for Windows write backslashes
