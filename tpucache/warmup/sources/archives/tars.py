"""The files in a .tar: listed by one walk from header to header, and each read by the offset of its header."""

from __future__ import annotations

import os
import posixpath
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tpucache.errors import SampleError, SourceError
from tpucache.store.files import open_file
from tpucache.warmup.sources.base import Member

_BLOCK: Final = tarfile.BLOCKSIZE
_READ: Final = 1 << 20
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BROKEN: Final = (tarfile.TarError, ValueError, OverflowError, EOFError, IndexError, RecursionError)
_AGAIN: Final = "copy it again"


def list_tar(path: Path, archive: str, advance: Callable[[int], object]) -> list[Member]:
    """Return all files of a tar in their order; `archive` is what its members call it. Links are the files they name.

    `advance` is called with the number of entries found.

    Raises SourceError when it is compressed, broken or cut short, or has sparse files or links out of it.
    """
    try:
        with open_file(path) as file:
            start = file.read(_BLOCK)
            kind = next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), None)
            if kind is not None:
                raise SourceError(
                    f"{path} is compressed as a whole ({kind}), so that single files cannot be read: decompress "
                    "it to a .tar, or make a .zip of it"
                )
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                entries = _entries(tar, advance)
                end = tar.offset
            _check_end(path, end)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error
    except _BROKEN as error:
        raise SourceError(f"{path} is no whole .tar file: {error or type(error).__name__}; {_AGAIN}") from error
    regular = {entry.name: entry for entry in entries if entry.isreg()}
    return [_member(path, archive, entry, regular) for entry in entries if entry.isreg() or _is_link(entry)]


def read_tar(descriptor: int, member: Member, path: str) -> bytes:
    """Return a file's content from an open tar. Raises SampleError, with `path`, when it is not what was listed."""
    whole = os.pread(descriptor, _BLOCK + member.bytes, member.offset)
    try:
        header = tarfile.TarInfo.frombuf(whole[:_BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        header = None
    if header is None or (header.chksum, len(whole)) != (member.checksum, _BLOCK + member.bytes):
        raise SampleError(path, "is no longer where the archive had it: the archive changed. Run warmup again")
    return whole[_BLOCK:]


def _entries(tar: tarfile.TarFile, advance: Callable[[int], object]) -> list[tarfile.TarInfo]:
    entries = []
    end = -1
    while (entry := tar.next()) is not None:
        if tar.offset <= end:  # a negative size, with which some versions of Python never end
            raise tarfile.ReadError(f"the size of {entry.name!r} is wrong")
        end = tar.offset
        entries.append(entry)
        advance(1)
        tar.members.clear()  # type: ignore[attr-defined]  # no entry is kept twice; typeshed lacks the attribute
    return entries


def _check_end(path: Path, end: int) -> None:
    """Raise SourceError unless nothing but zeros follows the last file: tarfile takes a damaged header for the end."""
    with open_file(path) as file:
        file.seek(end)
        first = file.read(_BLOCK)
        if len(first) < _BLOCK:
            raise SourceError(f"{path} is cut short: it has no end mark; {_AGAIN}")
        if any(first):
            raise SourceError(f"{path}, offset {end}: no file begins here, and the archive does not end; {_AGAIN}")
        while block := file.read(_READ):
            if any(block):
                raise SourceError(
                    f"{path} has more after its end, at offset {end}: it is several archives put together, or damaged. "
                    "Give them as separate files"
                )


def _is_link(entry: tarfile.TarInfo) -> bool:
    return entry.islnk() or entry.issym()


def _member(path: Path, archive: str, entry: tarfile.TarInfo, regular: Mapping[str, tarfile.TarInfo]) -> Member:
    target = entry
    if _is_link(entry):
        folder = posixpath.dirname(entry.name) if entry.issym() else ""
        name = posixpath.normpath(posixpath.join(folder, entry.linkname))
        found = regular.get(entry.linkname) if entry.islnk() else None
        target = found or regular.get(name, entry)
        if _is_link(target):
            raise SourceError(
                f"{path}: {entry.name!r} is a link to {entry.linkname!r}, which is no file of it: make it with "
                "`tar --dereference`"
            )
    if target.issparse():
        raise SourceError(f"{path}: {entry.name!r} is a sparse file: make the archive without `--sparse`")
    return Member(archive, entry.name, target.offset_data - _BLOCK, target.size, target.size, target.chksum)
