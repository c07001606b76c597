"""Decodes records at another size than the stored one: images from their low frequencies, and what lies on them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Final

import numpy as np

from tpucache.errors import UsageError
from tpucache.geometry import Placement, clip_boxes, fill_boxes, margins, mark_points, nearest, placement, within
from tpucache.native import Array
from tpucache.ondevice.decode import CoefficientDecoder, Resize, packed_or_pixels, to_resize
from tpucache.store.codecs import CODECS, FREQUENCY_CODECS, unpack_rows
from tpucache.store.codecs.coefficients import BLOCK
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, MASK, Field, ResizedView
from tpucache.store.index import Numbers
from tpucache.store.manifest import Manifest

_FITS = ("crop", "pad", "stretch")
_AT_ONCE = 8  # images per step, so that their coefficients stay in the CPU's cache

_FEW: Final = 3  # up to this many frequencies, one more is used
_MARGIN: Final = 0.25  # above that, a quarter of a frequency is added before rounding up


def in_resolution(manifest: Manifest, size: int | tuple[int, int] | None, frequencies: int | None) -> Manifest:
    """Return a manifest whose image, masks, boxes and keypoints have another size; the manifest itself without one."""
    image = next((field for field in manifest.fields if field.name == IMAGE), None)
    if size is None:
        if frequencies is not None:
            raise UsageError("frequencies only applies together with resolution: give resolution=, too")
        return manifest
    if image is None or not CODECS[image.codec].has_frequencies:
        found = "no image" if image is None else f"images of the codec {image.codec}"
        raise UsageError(
            f"resolution= takes the low frequencies of {' and '.join(FREQUENCY_CODECS)}, and this cache has {found}: "
            "resize on the device, with tpucache.ondevice.decoder(dataset, size)"
        )
    fit = manifest.recipe.get("fit")
    resize = to_resize(image, size, fit if fit in _FITS else "crop")
    if frequencies is None:
        frequencies = frequencies_for(resize, image)
    if not isinstance(frequencies, int) or isinstance(frequencies, bool) or not 1 <= frequencies <= BLOCK:
        raise UsageError(f"frequencies are a whole number from 1 to {BLOCK}, not {frequencies!r}")
    fields = tuple(_shown(field, resize, frequencies, image) for field in manifest.fields)
    return dataclasses.replace(manifest, fields=fields)


def frequencies_for(resize: Resize, image: Field) -> int:
    """Return how many of a block's 8 frequencies are needed to read images at the size of `resize`.

    Up to n = 3, and just below n = 4, one more frequency is used, because it still improves the result (docs/numbers.md
    has the measurements).
    """
    place = _placement(image.shape, resize)
    left, top, right, bottom = place.box
    shown = BLOCK * max(place.size[0] / (right - left), place.size[1] / (bottom - top))
    if shown <= _FEW:
        return math.ceil(shown) + 1
    return math.ceil(shown + _MARGIN) if shown < BLOCK // 2 else min(BLOCK, math.ceil(shown))


def decode_view(field: Field, stored: Field, block: Array, spans: Numbers, out: Array, rows: Numbers) -> None:
    """Decode a field of many records at the size in `field.view`. `stored` is the field as the cache stores it."""
    if field.name == IMAGE:
        for first in range(0, len(rows), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            packed = np.empty((len(rows[some]), *field.packed.shape), np.uint8)
            unpack_rows(field, block, spans[some], packed, np.arange(len(packed)))
            out[rows[some]] = _decoder(field).decode_here(packed)
        return
    whole = np.empty(stored.shape, stored.dtype)
    for (start, end), row in zip(spans.tolist(), rows.tolist(), strict=True):
        CODECS[stored.codec].decode_into(stored, block.data[start:end], whole)
        out[row] = moved(whole, field)


def moved(array: Array, field: Field) -> Array:
    """Transform a stored mask, boxes or keypoints to the image size in `field.view`."""
    view = field.view
    if view is None:
        return array
    height, width = view.canvas
    place = _placement(view.image, Resize(height, width, view.fit))
    left, top = margins(place.size, (width, height))
    right, bottom = left + place.size[0], top + place.size[1]
    box_left, box_top, box_right, box_bottom = place.box
    if field.name == MASK:
        rows = nearest(box_top, box_bottom, place.size[1], view.image[0])
        columns = nearest(box_left, box_right, place.size[0], view.image[1])
        shown = np.zeros(field.shape, array.dtype)
        shown[top:bottom, left:right] = array[rows[:, None], columns]
        return shown
    scale = np.array([place.size[0] / (box_right - box_left), place.size[1] / (box_bottom - box_top)])
    area = left, top, right, bottom
    corners = [(array[:, at : at + 2].astype(np.float64) - place.box[:2]) * scale + area[:2] for at in (0, 2)]
    if field.name == KEYPOINTS:
        points = corners[0].astype(np.float32)
        return mark_points(points, within(points, area) & (array[:, 2] > 0), area)
    is_box = array[:, 2] > array[:, 0]  # unused rows are -1
    boxes = np.hstack([*corners, array[:, 4:]])[is_box]
    return fill_boxes(clip_boxes(boxes, area), len(array))


def _shown(field: Field, resize: Resize, frequencies: int, image: Field) -> Field:
    if field.name == IMAGE:
        shape: tuple[int, ...] = (resize.height, resize.width, field.shape[2])
    elif field.name == MASK:
        shape = (resize.height, resize.width, *field.shape[2:])
    elif field.name in (BOXES, KEYPOINTS):
        shape = field.shape
    else:
        return field
    canvas = resize.height, resize.width
    return dataclasses.replace(
        field, shape=shape, view=ResizedView(field.shape, resize.fit, frequencies, image.shape, canvas)
    )


def _placement(shape: tuple[int, ...], resize: Resize) -> Placement:
    return placement((0.0, 0.0, float(shape[1]), float(shape[0])), (resize.width, resize.height), resize.fit)


@functools.lru_cache(8)
def _decoder(field: Field) -> CoefficientDecoder:
    found = packed_or_pixels(field)
    if not isinstance(found, CoefficientDecoder):
        raise UsageError(f"images of the codec {field.codec} have no frequencies")
    return found
