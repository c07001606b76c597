"""Find the offset and length of each value in an LMDB file by walking the file's pages.

The page layout is that of LMDB 0.9 (`mdb.c`: MDB_page, MDB_node, MDB_meta, MDB_db), data format 1, on a 64-bit
little-endian machine. The lmdb library is not needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

from tpucache.errors import FormatError

PAGE_HEADER_BYTES: Final = 16

_MAGIC: Final = 0xBEEFC0DE
_DATA_VERSION: Final = 1
_BRANCH, _LEAF, _META = 0x01, 0x02, 0x08
_BIG_DATA: Final = 0x01
_NO_PAGE: Final = (1 << 64) - 1
_MAX_DEPTH: Final = 32  # LMDB's own cursor stack
_MAX_FILE_BYTES: Final = (1 << 63) - 1

_PAGE: Final = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_NODE: Final = struct.Struct("<HHHH")  # low, high, flags, key size
_PAGE_NUMBER: Final = struct.Struct("<Q")
_META_HEAD: Final = struct.Struct("<IIQQ")  # magic, version, address, map size
_DB: Final = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow, entries, root
_META_TAIL: Final = struct.Struct("<QQ")  # last page, transaction
_META_BYTES: Final = PAGE_HEADER_BYTES + _META_HEAD.size + 2 * _DB.size + _META_TAIL.size


class MetaPage(NamedTuple):
    """The content of the newer of an LMDB file's two meta pages.

    The file has `pages` pages of `page_size` bytes and `entries` values. `root` is the number of the root page of the
    tree, None if the tree is empty; `depth` is its number of levels.
    """

    page_size: int
    pages: int
    entries: int
    root: int | None
    depth: int

    @property
    def file_bytes(self) -> int:
        return self.pages * self.page_size


class Extent(NamedTuple):
    """One LMDB value: its key, the offset in the file at which it starts, and its length in bytes."""

    key: bytes
    offset: int
    length: int


def read_layout(file: BinaryIO) -> MetaPage:
    first = _read_meta(file, 0)
    page_size = first[1].page_size
    if page_size < 512 or page_size & (page_size - 1):
        raise FormatError(f"{_name(file)}: an LMDB page cannot have {page_size} bytes")
    second = _read_meta(file, page_size)
    layout = max(first, second, key=lambda meta: meta[0])[1]
    if layout.page_size != page_size or layout.file_bytes > _MAX_FILE_BYTES:
        raise FormatError(f"{_name(file)}: its two meta pages contradict each other")
    return layout


def walk(file: BinaryIO, layout: MetaPage | None = None) -> Iterator[Extent]:
    layout = layout or read_layout(file)
    if layout.root is not None:
        yield from _walk_page(file, layout, layout.root, layout.depth, set())


def _walk_page(file: BinaryIO, layout: MetaPage, number: int, levels: int, seen: set[int]) -> Iterator[Extent]:
    if not 0 < levels <= _MAX_DEPTH or number in seen:
        raise FormatError(f"{_name(file)}: page {number} is in the tree twice or too deep")
    seen.add(number)
    start = number * layout.page_size
    page = _read_page(file, layout, number)
    _, _, flags, lower, _ = _PAGE.unpack_from(page)
    if not flags & (_BRANCH | _LEAF) or not PAGE_HEADER_BYTES <= lower <= len(page):
        raise FormatError(f"{_name(file)}: page {number} is not a branch or leaf (flags {flags:#x})")
    pointers = struct.unpack_from(f"<{(lower - PAGE_HEADER_BYTES) // 2}H", page, PAGE_HEADER_BYTES)
    for pointer in pointers:
        try:
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, pointer)
            data = pointer + _NODE.size + key_bytes
            if flags & _BRANCH:
                child = low | high << 16 | node_flags << 32
                yield from _walk_page(file, layout, child, levels - 1, seen)
                continue
            length = low | high << 16
            key = page[pointer + _NODE.size : data]
            if node_flags & _BIG_DATA:
                (overflow,) = _PAGE_NUMBER.unpack_from(page, data)
                offset = overflow * layout.page_size + PAGE_HEADER_BYTES
            elif node_flags:
                raise FormatError(f"{_name(file)}: page {number} holds duplicate keys or a database, unlike a shard")
            else:
                offset = start + data
        except struct.error as error:
            raise FormatError(f"{_name(file)}: page {number} is cut off inside a node") from error
        if offset + length > layout.file_bytes:
            raise FormatError(f"{_name(file)}: page {number} points beyond the end of the file")
        yield Extent(key, offset, length)


def _read_page(file: BinaryIO, layout: MetaPage, number: int) -> bytes:
    if not 2 <= number < layout.pages:
        raise FormatError(f"{_name(file)}: there is no page {number}")
    file.seek(number * layout.page_size)
    page = file.read(layout.page_size)
    if len(page) != layout.page_size:
        raise FormatError(f"{_name(file)}: the file ends inside page {number}")
    return page


def _read_meta(file: BinaryIO, offset: int) -> tuple[int, MetaPage]:
    """Return the transaction number and the contents of one meta page."""
    file.seek(offset)
    page = file.read(_META_BYTES)
    if len(page) < _META_BYTES:
        raise FormatError(f"{_name(file)}: too short to be an LMDB file")
    at = PAGE_HEADER_BYTES
    magic, version, _, _ = _META_HEAD.unpack_from(page, at)
    if magic != _MAGIC or version != _DATA_VERSION or not _PAGE.unpack_from(page)[2] & _META:
        raise FormatError(f"{_name(file)}: not an LMDB file of data format {_DATA_VERSION}")
    at += _META_HEAD.size
    page_size = _DB.unpack_from(page, at)[0]  # the free list's pad field holds the page size
    _, _, depth, _, _, _, entries, root = _DB.unpack_from(page, at + _DB.size)
    last_page, transaction = _META_TAIL.unpack_from(page, at + 2 * _DB.size)
    found_root = None if root == _NO_PAGE else root
    return transaction, MetaPage(page_size, last_page + 1, entries, found_root, depth)


def _name(file: BinaryIO) -> str:
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else "the file"  # the name may also be the number of a descriptor
