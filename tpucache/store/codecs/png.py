"""png: a PNG file. Without loss, a third smaller than raw, slow to write and to read."""

from __future__ import annotations

import struct
from typing import Any, Final

from tpucache.store.codecs.base import FieldSpec
from tpucache.store.codecs.pictures import PictureCodec, check_header

_DEFAULT_LEVEL: Final = 6
_BEGINNING: Final = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_HEADER: Final = struct.Struct(">IIBBBBB")  # width, height, depth, colours, compression, filter, interlace
_CHUNK: Final = struct.Struct(">I4s")  # length, name
_CHECKSUM: Final = 4
_FIRST_CHUNK: Final = len(_BEGINNING) + _HEADER.size + _CHECKSUM
_CHANNELS: Final = {0: 1, 2: 3}
_PARTS: Final = (b"IDAT", b"IEND")


class Png(PictureCodec):
    """A PNG file, written and read by Pillow."""

    name = "png"
    quality_range = (0, 9)
    typical_ratio = 0.65

    def _check_file(self, field: FieldSpec, data: memoryview) -> None:
        if bytes(data[:16]) != _BEGINNING or len(data) < _FIRST_CHUNK:
            raise ValueError("no header of a PNG file")
        width, height, depth, colours, *ways = _HEADER.unpack_from(data, len(_BEGINNING))
        if depth != 8 or colours not in _CHANNELS or any(ways):
            raise ValueError(f"pixels of {depth} bits in a form {colours, *ways} that no writer writes")
        check_header(field, height, width, _CHANNELS[colours])
        at = _FIRST_CHUNK
        while at < len(data):
            length, name = _CHUNK.unpack_from(data, at) if at + _CHUNK.size <= len(data) else (0, b"")
            if name not in _PARTS:
                raise ValueError(f"a part {name!r} that no writer writes")
            at += length + _CHUNK.size + _CHECKSUM

    def _save_options(self, quality: int | None) -> dict[str, Any]:
        return {"compress_level": _DEFAULT_LEVEL if quality is None else quality}
