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
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO, Final

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
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BROKEN_TAR: Final = (tarfile.TarError, ValueError, OverflowError, EOFError, IndexError, RecursionError)

# Appnote 4.3.7: signature, version, flags, method, time, date, checksum, packed size, size, lengths of name and extra.
_HEADER: Final = struct.Struct("<4s5H3I2H")
_SIGNATURE: Final = b"PK\x03\x04"
#: The most bytes that most programs write after a file's name: they are read together with the file.
_EXTRA_BYTES: Final = 512
_ENCRYPTED: Final = 1
_UTF8: Final = 0x800
#: Deflate makes at most 258 bytes out of two bits.
_MOST_EXPANSION: Final = 1032
_BROKEN_ZIP: Final = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, EOFError)


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
                if not _NAMES.search(path.name):
                    raise SourceError(f"{path} does not end with .zip or .tar: give a pattern of archives alone")
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
            if archive.suffix.lower() != _ZIP:
                return read_tar(opened.number, member, path)
            return read_zip(functools.partial(os.pread, opened.number), member, path)
        except OSError as error:
            raise SampleError(path, f"cannot be read: {archive}: {error.strerror}") from error


def find_archive(source: str | Path) -> ArchiveFiles | None:
    """Return the files that a path such as `a.zip`, `a.zip/folder` or `part-*.tar` names, or None for other paths."""
    path = Path(source)
    for end in (path, *path.parents):
        if _NAMES.search(end.name) and (end.is_file() or (has_wildcard(str(end)) and not end.exists())):
            inside = PurePosixPath(path.relative_to(end)).as_posix()
            return ArchiveFiles(*split_pattern(end), "" if inside == "." else inside)
    return None


#: Opens an archive. Samples are read in order, so that those of one moment lie in few archives.
_opened: Final = cached_until_changed(4)(OpenFile)


def plain_members(members: Sequence[Member], where: str) -> dict[str, Member]:
    """Return members by their plain names (without `./`), in order; the name of a folder ends with a slash."""
    found: dict[str, Member] = {}
    for member in sorted(members, key=lambda member: member.name.endswith("/")):  # folders last
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        name, is_folder = "/".join(parts), member.name.endswith("/")
        if ".." in parts or "\0" in name or not (parts or is_folder):
            raise SourceError(
                f"{where}: entry {member.name!r} leads out of the archive, which is damaged or made to do harm"
            )
        if name in found and not is_folder:
            raise SourceError(f"{where} has {name!r} more than once: make the archive again, with each file once")
        if parts:
            found[f"{name}/" if is_folder else name] = member
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
            entries = _entries(tar, advance)
            end = tar.offset
    except _BROKEN_TAR as error:
        raise SourceError(
            f"{path} is not a complete .tar file: {error or type(error).__name__}; copy it again"
        ) from error
    _check_end(file, path, end)
    regular = {entry.name: entry for entry in entries if entry.isreg()}
    return [
        Member(archive, f"{entry.name}/", 0, 0, 0, 0) if entry.isdir() else _member(path, archive, entry, regular)
        for entry in entries
        if entry.isreg() or entry.isdir() or entry.islnk() or entry.issym()
    ]


def read_tar(descriptor: int, member: Member, path: str) -> bytes:
    """Return a file's content from an open tar."""
    whole = os.pread(descriptor, _BLOCK + member.bytes, member.offset)
    try:
        header = tarfile.TarInfo.frombuf(whole[:_BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        header = None
    if header is None or (header.chksum, len(whole)) != (member.checksum, _BLOCK + member.bytes):
        raise SampleError(path, "is no longer at its place in the archive, which has changed: run warmup again")
    return whole[_BLOCK:]


def _entries(tar: tarfile.TarFile, advance: Callable[[int], object]) -> list[tarfile.TarInfo]:
    entries = []
    end = -1
    while (entry := tar.next()) is not None:
        if tar.offset <= end:  # a negative size, with which some versions of Python loop forever
            raise tarfile.ReadError(f"the size of {entry.name!r} is wrong")
        end = tar.offset
        entries.append(entry)
        advance(1)
        tar.members.clear()  # type: ignore[attr-defined]  # do not keep entries twice; typeshed lacks the attribute
    return entries


def _check_end(file: BinaryIO, path: Path, end: int) -> None:
    """Raise SourceError unless only zeros follow the last file: tarfile mistakes a damaged header for the end."""
    file.seek(end)
    first = file.read(_BLOCK)
    if len(first) < _BLOCK:
        raise SourceError(f"{path} is cut short: it has no end mark; copy it again")
    if any(first):
        raise SourceError(f"{path}, offset {end}: here is neither a file nor the end of the archive; copy it again")
    while block := file.read(_READ):
        if any(block):
            raise SourceError(
                f"{path} has more data after its end, at offset {end}: it is several archives in one, or damaged. Give "
                "each archive as a file of its own"
            )


def _member(path: Path, archive: str, entry: tarfile.TarInfo, regular: Mapping[str, tarfile.TarInfo]) -> Member:
    folder = posixpath.dirname(entry.name) if entry.issym() else ""
    name = posixpath.normpath(posixpath.join(folder, entry.linkname))
    linked = (regular.get(entry.linkname) if entry.islnk() else None) or regular.get(name)
    target = entry if entry.isreg() else linked
    if target is None:
        raise SourceError(
            f"{path}: {entry.name!r} is a link to {entry.linkname!r}, which is not in the archive: make "
            "the archive with `tar --dereference`"
        )
    if target.issparse():
        raise SourceError(f"{path}: {entry.name!r} is a sparse file: make the archive without `--sparse`")
    return Member(archive, entry.name, target.offset_data - _BLOCK, target.size, target.size, target.chksum)


class _TailFile(io.RawIOBase):
    """A file for zipfile, which reads at the end first: the last MiB is fetched at once, and other bytes as asked."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch, self._size, self._at = functools.lru_cache(1)(fetch), size, 0
        self._tail = max(0, size - _READ)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        start, stop = self._at, max(self._at, min(self._size, self._at + len(buffer)))
        first, last = (self._tail, self._size) if start >= self._tail else (start, stop)
        buffer[: stop - start] = self._fetch(first, last)[start - first : stop - first] if stop > start else b""
        self._at = stop
        return stop - start


def zip_file(fetch: Callable[[int, int], bytes], size: int) -> BinaryIO:
    """Return a file for `list_zip` whose bytes `start` to `stop` are `fetch(start, stop)`; it has `size` bytes."""
    return io.BufferedReader(_TailFile(fetch, size), _READ)


def list_zip(opened: IO[bytes], path: str, archive: str, advance: Callable[[int], object]) -> list[Member]:
    """Return the Members of an open zip, as `_members` does: files in the order of its directory, then folders."""
    try:
        with zipfile.ZipFile(opened) as file:
            infos = file.infolist()
    except _BROKEN_ZIP as error:
        raise SourceError(f"{path} is not a complete .zip file: {error}. Copy it again") from error
    entries = [entry for entry in infos if not entry.is_dir()]
    advance(len(entries))
    for entry in entries:
        if problem := _problem(entry):
            raise SourceError(f"{path}: entry {entry.filename!r} {problem}")
    ends = sorted((entry.header_offset, entry.header_offset + _HEADER.size + entry.compress_size) for entry in entries)
    if any(end > start for (_, end), (start, _) in itertools.pairwise(ends)):
        raise SourceError(f"{path}: entries overlap: the archive is damaged, or made to do harm")
    return [
        *(
            Member(archive, _name(entry), entry.header_offset, entry.file_size, entry.compress_size, entry.CRC)
            for entry in entries
        ),
        *(Member(archive, f"{_name(entry).rstrip('/')}/", 0, 0, 0, 0) for entry in infos if entry.is_dir()),
    ]


def read_zip(pread: Callable[[int, int], bytes], member: Member, path: str) -> bytes:
    """Return a file's content from a zip. `pread(count, offset)` reads up to `count` bytes of the zip at `offset`.

    One call of `pread` is usually enough.
    """
    found = pread(_HEADER.size + len(member.name.encode()) + _EXTRA_BYTES + member.packed, member.offset)
    if len(found) < _HEADER.size or not found.startswith(_SIGNATURE):
        raise SampleError(path, "is no longer at its place in the archive, which has changed: run warmup again")
    _, _, _, method, _, _, _, _, _, name_length, extra_length = _HEADER.unpack_from(found)
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
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"is compressed by method {entry.compress_type}: only stored and deflated files are read, zip it again"
    most = entry.compress_size * (1 if entry.compress_type == zipfile.ZIP_STORED else _MOST_EXPANSION)
    if entry.file_size > most:
        return f"claims {entry.file_size:,} bytes, compressed to {entry.compress_size:,}: that is impossible"
    return ""


def _name(entry: zipfile.ZipInfo) -> str:
    name = entry.filename
    if not entry.flag_bits & _UTF8:  # macOS writes UTF-8 without the flag that says so
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode()
    return name if "/" in name else name.replace("\\", "/")  # some programs for Windows write backslashes
