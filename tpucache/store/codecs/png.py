"""png: a PNG file. Without loss, a third smaller than raw, slow to write and to read."""

from __future__ import annotations

from typing import Any

from tpucache.store.codecs.pictures import PictureCodec

_DEFAULT_LEVEL = 6


class Png(PictureCodec):
    """A PNG file, written and read by Pillow."""

    name = "png"
    quality_range = (0, 9)
    typical_ratio = 0.65

    def _save_options(self, quality: int | None) -> dict[str, Any]:
        return {"compress_level": _DEFAULT_LEVEL if quality is None else quality}
