"""The files in a .zip: listed by its directory, and each read by the offset of its header."""

from __future__ import annotations

import itertools
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tpucache.errors import SampleError, SourceError
from tpucache.store.files import open_file
from tpucache.warmup.sources.base import Member

# Appnote 4.3.7: signature, version, flags, method, time, date, checksum, packed size, size, lengths of name and extra.
_HEADER: Final = struct.Struct("<4s5H3I2H")
_SIGNATURE: Final = b"PK\x03\x04"
_ENCRYPTED: Final = 1
#: Deflate makes at most 258 bytes of two bits.
_MOST_EXPANSION: Final = 1032
_BROKEN: Final = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, EOFError)


def list_zip(path: Path, archive: str, advance: Callable[[int], object]) -> list[Member]:
    """Return all files of a zip in the order of its directory; `archive` is what its members call it.

    `advance` is called with their number.

    Raises SourceError when it is broken, or when an entry is encrypted, packed otherwise than by deflate, lies over
    another one, or claims to be larger than it can be.
    """
    try:
        with open_file(path) as opened, zipfile.ZipFile(opened) as file:
            entries = [entry for entry in file.infolist() if not entry.is_dir()]
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error
    except _BROKEN as error:
        raise SourceError(f"{path} is no whole .zip file: {error}. Copy it again") from error
    advance(len(entries))
    for entry in entries:
        if problem := _problem(entry):
            raise SourceError(f"{path}: entry {entry.filename!r} {problem}")
    ends = sorted((entry.header_offset, entry.header_offset + _HEADER.size + entry.compress_size) for entry in entries)
    if any(end > start for (_, end), (start, _) in itertools.pairwise(ends)):
        raise SourceError(f"{path}: entries lie over one another: it is damaged, or made to do harm")
    return [
        Member(archive, _name(entry), entry.header_offset, entry.file_size, entry.compress_size, entry.CRC)
        for entry in entries
    ]


def read_zip(descriptor: int, member: Member, path: str) -> bytes:
    """Return a file's content from an open zip. Raises SampleError, with `path`, when it is not what was listed."""
    header = os.pread(descriptor, _HEADER.size, member.offset)
    if len(header) < _HEADER.size or not header.startswith(_SIGNATURE):
        raise SampleError(path, "is no longer where the archive had it: the archive changed. Run warmup again")
    _, _, _, method, _, _, _, _, _, name_length, extra_length = _HEADER.unpack(header)
    data = os.pread(descriptor, member.packed, member.offset + _HEADER.size + name_length + extra_length)
    if method == zipfile.ZIP_DEFLATED:
        data = _inflate(data, member.bytes, path)
    if len(data) != member.bytes or zlib.crc32(data) != member.checksum:
        raise SampleError(path, "is damaged: it does not match the checksum in its archive")
    return data


def _inflate(data: bytes, size: int, path: str) -> bytes:
    """Unpack deflated data up to one byte more than its size, whatever it claims to become."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
    except zlib.error as error:
        raise SampleError(path, f"is damaged: {error}") from error


def _problem(entry: zipfile.ZipInfo) -> str:
    """Return why an entry cannot be read, as the rest of a sentence; nothing where it can."""
    if entry.flag_bits & _ENCRYPTED:
        return "is encrypted: unpack it with its password, and zip it without one"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"is packed by method {entry.compress_type}: only stored and deflated files are read, zip it anew"
    most = entry.compress_size * (1 if entry.compress_type == zipfile.ZIP_STORED else _MOST_EXPANSION)
    if entry.file_size > most:
        return f"claims {entry.file_size:,} bytes, packed in {entry.compress_size:,}: that is not possible"
    return ""


def _name(entry: zipfile.ZipInfo) -> str:
    """Return an entry's path with slashes: some programs for Windows write backslashes."""
    name = entry.filename
    return name if "/" in name else name.replace("\\", "/")
