"""Whether masks hold numbers of classes, judged by some of them before anything is built."""

from __future__ import annotations

import logging
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import RecipeError, SampleError
from tpucache.recipe import Recipe
from tpucache.store.fields import MASK
from tpucache.warmup.records.decoding.masks import decode_mask
from tpucache.warmup.sources.base import Listing, Source

Array = npt.NDArray[Any]

_LOOKED_AT: Final = 32  # masks, evenly over all samples: the same ones whatever the workers
_WHITE: Final = 255
_MOST_CLASSES: Final = 150  # in one mask: as many as ADE20K has in all
_FAR: Final = 16  # between neighbours among levels of grey
_BRIGHT: Final = 200  # the least that is the brightest level of grey
_JPEG: Final = b"\xff\xd8\xff"
_JPEG_ADVICE: Final = (
    "the first mask is a JPEG, which changes numbers of classes: save masks without loss, as PNG, or give "
    "--mask-values scale where they are black and white"
)

_log: Final = logging.getLogger("tpucache")


def check_masks(source: Source, listing: Listing, recipe: Recipe) -> None:
    """Raise RecipeError where masks, as they are stored, are pictures in black and white or grey, not class numbers.

    Some masks are looked at, and what all of them hold together decides: a mask of 0 and 255 among others of 1 and 2 is
    one of class 0 and of pixels without a class. Masks that cannot be used are reported when they are built.
    """
    samples, found, most, looked_at = listing.samples, set[int](), 0, 0
    for position in sorted({*np.linspace(0, len(samples) - 1, _LOOKED_AT).round().astype(int).tolist()}):
        try:
            mask = source.load(samples[position]).fields.get(MASK)
            if mask is None:
                continue
            if not looked_at and isinstance(mask, bytes) and mask.startswith(_JPEG):
                _log.warning(_JPEG_ADVICE)
                return
            values = np.unique(decode_mask(mask, "", recipe)).tolist()
        except SampleError:
            continue
        found |= {*values}
        most, looked_at = max(most, len(values)), looked_at + 1
    if (fault := _fault(sorted(found), most)) is not None:
        masks = "the mask that was looked at holds" if looked_at == 1 else f"{looked_at} masks that were looked at hold"
        raise RecipeError(
            f"{masks} {fault}, not numbers of classes: give --mask-values scale where they are black and white, and "
            "white becomes class 1, or --mask-values keep where they are numbers of classes and 255 is a pixel without "
            "a class, which training ignores"
        )


def _fault(values: list[int], most: int) -> str | None:
    """Return what speaks against class numbers, given all values in order and the most that one mask has."""
    if _WHITE in values and {*values} <= {0, _WHITE}:
        return "0 and 255 alone" if len(values) > 1 else "255 alone"
    gaps = np.diff(values)
    if len(values) > 2 and gaps.min() >= _FAR and values[-1] >= _BRIGHT:
        return f"levels of grey, {', '.join(map(str, values))}"
    return f"up to {most} different numbers each" if most > _MOST_CLASSES else None
