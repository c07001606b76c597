"""PNG and JPEG files byte by byte: what no library writes, and random damage of any file."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Final

GREY, RGB = 0, 2  # colour types of PNG


def mutate(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 3))):
        content = rng.choice(_MUTATIONS)(content, rng)
    return content


def _flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(1, 16)):
        if changed:
            changed[rng.randrange(rng.choice((min(64, len(changed)), len(changed))))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(content: bytes, rng: random.Random) -> bytes:
    start, stop = _span(content, rng)
    return content[:start] + content[stop:]


def _end(content: bytes, rng: random.Random) -> bytes:
    return content[: _span(content, rng)[1]]


def _insert(content: bytes, rng: random.Random) -> bytes:
    start, _ = _span(content, rng)
    return content[:start] + rng.randbytes(rng.randint(1, 64)) + content[start:]


def _fill(content: bytes, rng: random.Random) -> bytes:
    start, stop = _span(content, rng)
    stop = min(stop, start + 8)
    return content[:start] + rng.choice((b"\0", b"\x7f", b"\xff")) * (stop - start) + content[stop:]


def _swap(content: bytes, rng: random.Random) -> bytes:
    start, stop = _span(content, rng)
    middle = rng.randint(start, stop)
    return content[:start] + content[middle:stop] + content[start:middle] + content[stop:]


_MUTATIONS: Final[Sequence[Callable[[bytes, random.Random], bytes]]] = (_flip, _flip, _cut, _end, _insert, _fill, _swap)


def _span(content: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randint(0, len(content))
    return start, min(len(content), start + rng.randint(0, len(content) // 4))


def png_file(width: int, height: int, depth: int, colour: int, rows: int | None = None) -> bytes:
    row = bytes(1 + -(-width * depth * (3 if colour == RGB else 1) // 8))
    packer = zlib.compressobj(1)
    pixels = b"".join([packer.compress(row) for _ in range(height if rows is None else rows)]) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_chunk(png: bytes, kind: bytes, content: bytes) -> bytes:
    behind = 8 + 25
    return png[:behind] + chunk(kind, content) + png[behind:]


def resized_header(jpeg: bytes, side: int) -> bytes:
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + struct.pack(">HH", side, side) + jpeg[at + 4 :]


def without_segment(jpeg: bytes, marker: int) -> bytes:
    at = jpeg.index(bytes([0xFF, marker]))
    return jpeg[:at] + jpeg[at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big") :]
