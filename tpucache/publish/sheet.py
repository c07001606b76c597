"""A contact sheet for the card: some samples down, variants across."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import DependencyError
from tpucache.store.codec import decode_into
from tpucache.store.manifest import Manifest
from tpucache.store.reader import ShardReader, open_index

_ROWS: Final = 6
_COLUMNS: Final = 6
_CELL: Final = 128
_GAP: Final = 4


def contact_sheet(cache: Path) -> bytes | None:
    """Return some samples of a cache, in all or six of their variants, as a PNG; None where records hold no images.

    Raises DependencyError without Pillow, and what reading a cache raises.
    """
    manifest = Manifest.load(cache)
    at = next((at for at, field in enumerate(manifest.fields) if field.name == "image"), None)
    if at is None or not manifest.samples or manifest.fields[at].shape[2:] not in ((1,), (3,)):
        return None
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DependencyError("the card's sheet of samples needs Pillow: `pip install pillow`") from error
    variants = range(min(len(manifest.variants), _COLUMNS))
    samples = np.linspace(0, manifest.samples - 1, min(manifest.samples, _ROWS)).astype(int).tolist()
    step = _CELL + _GAP
    sheet = Image.new("RGB", (step * len(variants) - _GAP, step * len(samples) - _GAP), "white")
    index, reader = open_index(cache, manifest), ShardReader(cache, manifest.shards)
    for row, sample in enumerate(samples):
        for column in variants:
            pixels = _image(manifest, at, reader.read(index[column * manifest.samples + sample]))
            image = Image.fromarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)).copy())
            image = ImageOps.contain(image, (_CELL, _CELL))
            margin = ((_CELL - image.width) // 2, (_CELL - image.height) // 2)
            sheet.paste(image, (column * step + margin[0], row * step + margin[1]))
    reader.close()
    target = io.BytesIO()
    sheet.save(target, "PNG")
    return target.getvalue()


def _image(manifest: Manifest, at: int, record: bytearray) -> Any:
    """Return the image of a record, uint8 (height, width, channels)."""
    field = manifest.fields[at]
    pixels = np.empty(field.shape, field.dtype)
    decode_into(field, manifest.layout.split(memoryview(record))[at], pixels)
    return pixels
