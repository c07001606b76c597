"""Converts a sample, as its source returns it, to the arrays of its clean record.

The annotations of an image (mask, boxes, keypoints) go through the same geometry as the image. Without an image, arrays
with these names are like any other arrays.

Viewers turn an image that has an EXIF orientation. The recipe's `coordinates` states whether annotations refer to the
image as displayed or as stored. Without `coordinates`, a sample is refused if the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SampleError, SourceError
from tpucache.geometry import (
    TURNS,
    Coordinates,
    Framing,
    Turn,
    clip_boxes,
    fill_boxes,
    mark_points,
    turn,
    turn_back,
    within,
)
from tpucache.native import Array
from tpucache.recipe import Recipe
from tpucache.store.codecs import CODECS
from tpucache.store.fields import BOXES, DTYPES, FIELD_NAME, IMAGE, KEYPOINTS, MASK, Field
from tpucache.store.samples import HEIGHT, MEAN, STD, TURNED, TYPE, WIDTH
from tpucache.warmup.records.masks import DecodedMask, decode_turned_mask, draw_runs
from tpucache.warmup.records.numbers import SEVERAL
from tpucache.warmup.records.presize import presize, presize_framed
from tpucache.warmup.sources.source import Item, RunsOrder

#: An image and its annotations, in the order of the record.
IMAGE_FIELDS: Final = (IMAGE, MASK, BOXES, KEYPOINTS)

_FARTHEST: Final = 1 << 31  # more pixels than the side of any image
_UNSTATED: Final = (
    "give --coordinates displayed if annotations were drawn on images as viewers show them, else --coordinates stored"
)

#: The fact that the file of an image, or of its mask, has several frames. It is no column of the samples table: warmup
#: warns of such files.
SEVERAL_FRAMES: Final = "(several frames)"

#: The number of annotations by field.
Counts = dict[str, int]
#: Values of a source's image by column of the samples table, such as its width.
Facts = dict[str, int | float | str | None]

_COUNTERS: Final[Mapping[str, Callable[[Array], Any]]] = {
    MASK: lambda mask: mask.any(),
    BOXES: lambda boxes: ((boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])).sum(),
    KEYPOINTS: lambda points: (points[:, 2] > 0).sum(),
}


def image_fields(names: Container[str]) -> tuple[str, ...]:
    """Return which of `names` are the image and its annotations, in the record's order; () without an image."""
    return tuple(name for name in IMAGE_FIELDS if name in names) if IMAGE in names else ()


def record_fields(item: Item, recipe: Recipe, path: str = "the first sample") -> tuple[Field, ...]:
    """Return the fields that all records of a source have, derived from its sample `item`, whose path is `path`.

    - `image`: in the recipe's codec, uint8 (height, width, 3), or one channel in the mode grey. In the mode keep, it
      has the sample's channels and dtype.
    - `mask`: lossless, uint8 (height, width, 1).
    - `boxes`: float32 (max_boxes, 5).
    - `keypoints`: float32 (n, 3), for the n keypoints of the sample.
    - other arrays: unchanged, in the sample's order. They are stored in the recipe's codec if it can store any array,
      else raw.

    Raises SourceError if a record cannot hold an array, SampleError for an image that must be decoded and cannot be.
    """
    if not item.fields:
        raise SourceError("the first sample has no fields: give each sample an image or arrays")
    known = image_fields(_names(item))
    makers: dict[str, Callable[[], Field]] = {
        IMAGE: lambda: _image_field(item.fields[IMAGE], recipe, path),
        MASK: lambda: Field(MASK, CODECS[recipe.codec].mask_codec, "|u1", (recipe.height, recipe.width, 1)),
        BOXES: lambda: Field(BOXES, "raw", "<f4", (recipe.max_boxes, 5)),
        KEYPOINTS: lambda: Field(KEYPOINTS, "raw", "<f4", (_points(item.fields[KEYPOINTS]), 3)),
    }
    codec = recipe.codec if CODECS[recipe.codec].holds_any_array else "raw"
    others = [_array_field(name, value, codec) for name, value in item.fields.items() if name not in known]
    return (*(makers[name]() for name in known), *others)


def _image_field(value: bytes | Array, recipe: Recipe, path: str) -> Field:
    if recipe.mode == "keep":
        kept = presize(value, recipe, path)
        return Field(IMAGE, recipe.codec, kept.dtype.str, kept.shape)
    return recipe.image_field()


def clean_and_count(
    item: Item, fields: Sequence[Field], recipe: Recipe, path: str
) -> tuple[dict[str, Array], Counts, Facts]:
    """Return a sample's clean arrays by field, its counts of annotations by field, and values such as its width."""
    counts: Counts = {}
    facts: Facts = {}
    names = [field.name for field in fields]
    given = _names(item)
    for name in (*names, *given):
        if name not in given:
            raise SampleError(path, f"has no field {name!r}, as other samples have")
        if name not in names:
            raise SampleError(path, f"has a field {name!r}, unlike other samples")
    clean: dict[str, Array] = {}
    known = image_fields(names)
    if known:
        image, framing, kind = presize_framed(item.fields[IMAGE], recipe, path)
        clean[IMAGE], field = image, fields[names.index(IMAGE)]
        if image.dtype.str != field.dtype or image.shape != field.shape:
            raise SampleError(
                path,
                f"its image is {image.dtype} with {image.shape[2]} channels, in other samples {np.dtype(field.dtype)} "
                f"with {field.shape[2]}: make all images alike, or use --mode rgb or grey",
            )
        facts = _facts(framing, kind)
    for field in fields:
        if field.name == MASK and MASK in known and item.mask_runs is not None:
            clean[MASK], counts[MASK] = _mask_of_runs(item.mask_runs, item.runs_order, framing, recipe, path)
            continue
        value = item.fields[field.name]
        if field.name not in known:
            clean[field.name] = _array(field, value, path)
        elif field.name == MASK:
            mask = decode_turned_mask(value, path, recipe)
            clean[MASK], counts[MASK] = _mask(mask, framing, recipe, path)
            facts |= {SEVERAL_FRAMES: 1} if mask.has_several_frames else {}
        elif field.name == BOXES:
            boxes = _numbers(field.name, value, path)
            clean[BOXES], counts[BOXES] = _boxes(boxes, item.boxes_size, framing, recipe, path), len(boxes)
        elif field.name == KEYPOINTS:
            points = _numbers(field.name, value, path)
            clean[KEYPOINTS] = _keypoints(points, framing, recipe, field.shape[0], path)
            size = framing.stored_as(_coordinates(framing, recipe, path))
            counts[KEYPOINTS] = int(within(points, (0, 0, *size)).sum())
    return clean, counts, facts


def _facts(framing: Framing, kind: str) -> Facts:
    (width, height), kind_name = framing.stored_as("displayed"), kind.partition(" ")[0].lower()
    turned = int(framing.turn != Turn())
    facts: Facts = {WIDTH: width, HEIGHT: height, TYPE: kind_name, TURNED: turned, MEAN: None, STD: None}
    return {**facts, SEVERAL_FRAMES: 1} if kind.endswith(SEVERAL) else facts


def _names(item: Item) -> list[str]:
    return [*item.fields] if item.mask_runs is None else [*item.fields, MASK]


def _points(value: bytes | Array) -> int:
    if isinstance(value, bytes) or value.ndim != 2 or value.shape[1] != 2 or not len(value):
        raise SourceError(f"keypoints must be an array (n, 2) of x, y, not {_kind(value)}")
    return len(value)


def _array_field(name: str, value: bytes | Array, codec: str) -> Field:
    if not FIELD_NAME.fullmatch(name):
        raise SourceError(
            f"a field cannot be called {name!r}: use a to z, 0 to 9 and _, a letter first, at most 64 characters"
        )
    if isinstance(value, bytes):
        raise SourceError(f"field {name!r} is encoded bytes: only an image and its mask are decoded, give an array")
    dtype = value.dtype.newbyteorder("<").str
    if dtype not in DTYPES:
        raise SourceError(f"field {name!r} is {value.dtype}: a record holds {', '.join(DTYPES)}; convert the array")
    if not value.size:
        raise SourceError(f"field {name!r} is empty: an array of shape {value.shape}")
    return Field(name, codec, dtype, value.shape)


def _kind(value: bytes | Array) -> str:
    return "bytes" if isinstance(value, bytes) else f"{value.dtype} {value.shape}"


def _array(field: Field, value: bytes | Array, path: str) -> Array:
    dtype = np.dtype(field.dtype)
    if isinstance(value, bytes) or value.dtype.newbyteorder("<") != dtype or value.shape != field.shape:
        raise SampleError(path, f"field {field.name!r} is {_kind(value)}, in other samples {dtype} {field.shape}")
    return np.ascontiguousarray(value, dtype)


def _mask(mask: DecodedMask, framing: Framing, recipe: Recipe, path: str) -> tuple[Array, int]:
    """Return the visible part of a mask (height, width, 1), and 1 if any pixel of the whole mask is not 0, else 0.

    Without `recipe.coordinates`, the mask may have the orientation of the stored or of the displayed image, and its
    size must show which.
    """
    coordinates = recipe.coordinates
    stored = mask.classes
    displayed = turn(stored, TURNS[mask.orientation])
    readings = {"stored": stored, "displayed": turn_back(displayed, framing.turn)}
    stated = readings if coordinates is None else {coordinates: readings[coordinates]}
    fitting = [each for each in stated.values() if each.shape == framing.stored[::-1]]
    if not fitting:
        height, width = stored.shape if coordinates == "stored" else displayed.shape
        size = framing.stored if coordinates == "stored" or not framing.turn.swap else framing.stored[::-1]
        image = " x ".join(map(str, size))
        raise SampleError(path, f"the mask is {width} x {height} pixels, the image {image}: make their sizes equal")
    if len(fitting) > 1 and not np.array_equal(fitting[0], fitting[1]):
        raise SampleError(
            path,
            "the image has an EXIF orientation, and the mask's size does not show which orientation the mask has; "
            f"{_UNSTATED}",
        )
    return framing.nearest(fitting[0])[..., None], int(stored.any())


def _mask_of_runs(
    runs: Array, order: RunsOrder | None, framing: Framing, recipe: Recipe, path: str
) -> tuple[Array, int]:
    coordinates = _coordinates(framing, recipe, path)
    drawn = draw_runs(runs, framing.stored_as(coordinates), path, order)
    stored = drawn if coordinates == "stored" else turn_back(drawn, framing.turn)
    return framing.nearest(stored)[..., None], int(drawn.any())


def _numbers(name: str, value: bytes | Array, path: str) -> npt.NDArray[np.float64]:
    if isinstance(value, bytes) or value.dtype.kind not in "iuf":
        raise SampleError(path, f"{name} must be an array of numbers, not {_kind(value)}")
    numbers = value.astype(np.float64)
    if not (np.abs(numbers) <= _FARTHEST).all():
        raise SampleError(
            path,
            f"{name} hold numbers that are not finite, or beyond {_FARTHEST:,}: leave them out, or put them close to "
            "the image",
        )
    return numbers


def _coordinates(framing: Framing, recipe: Recipe, path: str) -> Coordinates:
    if recipe.coordinates is None and framing.turn != Turn():
        raise SampleError(
            path, f"the image has an EXIF orientation, which its annotations may follow or not; {_UNSTATED}"
        )
    return recipe.coordinates or "stored"


def _boxes(
    boxes: npt.NDArray[np.float64], size: tuple[int, int] | None, framing: Framing, recipe: Recipe, path: str
) -> npt.NDArray[np.float32]:
    most = recipe.max_boxes
    if not boxes.size:
        return fill_boxes(np.empty((0, 5)), most)
    if boxes.ndim != 2 or boxes.shape[1] not in (4, 5):
        raise SampleError(path, f"boxes must have the shape (n, 4) or (n, 5), not {boxes.shape}")
    wrong = np.flatnonzero((boxes[:, 2:4] < boxes[:, :2]).any(axis=1))
    if wrong.size:
        raise SampleError(path, f"box {wrong[0]} has a negative width or height: {boxes[wrong[0], :4].tolist()}")
    wrong = np.flatnonzero((boxes[:, 4:] < 0) | (boxes[:, 4:] % 1 != 0))
    if wrong.size:
        raise SampleError(path, f"box {wrong[0]} has the class {boxes[wrong[0], 4]:g}: give whole numbers from 0")
    if boxes[:, :4].max() <= 1 and (boxes[:, :4] % 1).any() and max(framing.stored) > 1:
        raise SampleError(
            path,
            f"its boxes, such as {boxes[0, :4].tolist()}, lie in one pixel: if they are fractions of the image, "
            "multiply them by its width and height",
        )
    coordinates = _coordinates(framing, recipe, path)
    if size is not None and not framing.is_of(size, coordinates):
        raise SampleError(
            path, f"its boxes refer to {size[0]} x {size[1]} pixels, but its image has another size: scale the boxes"
        )
    corners = np.stack([framing.points(points, coordinates) for points in (boxes[:, :2], boxes[:, 2:4])])
    classes = boxes[:, 4:] if boxes.shape[1] == 5 else np.zeros((len(boxes), 1))
    kept = clip_boxes(np.hstack([corners.min(axis=0), corners.max(axis=0), classes]), framing.area)
    if len(kept) > most:
        raise SampleError(path, f"holds {len(kept)} boxes, more than --max-boxes {most}: give a larger number")
    return fill_boxes(kept, most)


def _keypoints(
    points: npt.NDArray[np.float64], framing: Framing, recipe: Recipe, count: int, path: str
) -> npt.NDArray[np.float32]:
    if points.shape != (count, 2):
        raise SampleError(path, f"field 'keypoints' has the shape {points.shape}, in other samples {(count, 2)}")
    coordinates = _coordinates(framing, recipe, path)
    moved = framing.points(points, coordinates).astype(np.float32)
    visible = within(moved, framing.area, framing.turn[1:] if coordinates == "stored" else (False, False))
    return mark_points(moved, visible, framing.area)


def count_annotations(arrays: Mapping[str, Array]) -> Counts:
    """Return how many annotations the arrays of a record have, by field; empty without an image."""
    names = [name for name in _COUNTERS if name in arrays] if IMAGE in arrays else []
    return {name: int(_COUNTERS[name](arrays[name])) for name in names}
