"""Converts a sample, as its source returns it, to the arrays of its clean record.

Annotations (mask, boxes, keypoints) follow their image. Without one, arrays with these names are like any others.

The recipe's `coordinates` states whether annotations refer to the image as viewers display it, turned by its EXIF
orientation, or as stored. Without `coordinates`, a sample is refused if the two differ.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SourceError
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
from tpucache.warmup.records import naming, refusal
from tpucache.warmup.records.masks import DecodedMask, decode_turned_mask, draw_runs
from tpucache.warmup.records.numbers import SEVERAL
from tpucache.warmup.records.presize import presize, presize_framed
from tpucache.warmup.sources.source import Item

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


def image_fields(names: Container[str]) -> tuple[str, ...]:
    """Return the image and its annotations in `names`, in the record's order; () without an image."""
    return tuple([name for name in IMAGE_FIELDS if name in names]) if IMAGE in names else ()


def record_fields(item: Item, recipe: Recipe, path: str = "the first sample") -> tuple[Field, ...]:
    """Return the fields of all records of a source, derived from its sample `item` with the path `path`.

    - `image`: uint8 (height, width, 3), or one channel in the mode grey; in the mode keep, as in the sample.
    - `mask`: lossless, uint8 (height, width, 1).
    - `boxes`: float32 (max_boxes, 5).
    - `keypoints`: float32 (n, 3), for the n keypoints of the sample.
    - other arrays: unchanged, in the sample's order, and in the recipe's codec if it can store any array, else raw.

    Raises SourceError if a record cannot hold an array, SampleError for an image that must be decoded and cannot be.
    """
    given = _given(item)
    if not given:
        raise SourceError("the first sample has no fields: give each sample an image or arrays")
    known = image_fields(given)
    others = [_array_field(name, value, recipe) for name, value in given.items() if name not in known]
    return (*(_image_field(name, given[name], recipe, path) for name in known), *others)


def _given(item: Item) -> Mapping[str, bytes | Array]:
    return item.fields if item.mask_runs is None else {**item.fields, MASK: item.mask_runs}


def _image_field(name: str, value: bytes | Array, recipe: Recipe, path: str) -> Field:
    if name == IMAGE and recipe.mode != "keep":
        return recipe.image_field()
    if name == IMAGE:
        kept = presize(value, recipe, path)
        return Field(IMAGE, recipe.codec, kept.dtype.str, kept.shape)
    if name == MASK:
        return Field(MASK, CODECS[recipe.codec].mask_codec, "|u1", (recipe.height, recipe.width, 1))
    if name == BOXES:
        return Field(BOXES, "raw", "<f4", (recipe.max_boxes, 5))
    if isinstance(value, bytes) or value.ndim != 2 or value.shape[1] != 2 or not len(value):
        raise SourceError(f"keypoints must be an array (n, 2) of x, y, not {_kind(value)}")
    return Field(KEYPOINTS, "raw", "<f4", (len(value), 3))


def _array_field(name: str, value: bytes | Array, recipe: Recipe) -> Field:
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
    return Field(name, recipe.codec if CODECS[recipe.codec].holds_any_array else "raw", dtype, value.shape)


def _kind(value: bytes | Array) -> str:
    return "bytes" if isinstance(value, bytes) else f"{value.dtype} {value.shape}"


def clean_and_count(
    item: Item, fields: Sequence[Field], recipe: Recipe, path: str
) -> tuple[dict[str, Array], Counts, Facts]:
    """Return a sample's clean arrays and counts of annotations by field, and values such as its width."""
    clean: dict[str, Array] = {}
    counts: Counts = {}
    facts: Facts = {}
    with naming(path):
        given = _given(item)
        _check_names([field.name for field in fields], given)
        for field in fields:
            name, value = field.name, given[field.name]
            if name == IMAGE:  # it comes first
                image, framing, kind = presize_framed(value, recipe)
                clean[IMAGE], facts = _image(field, image), _facts(framing, kind)
            elif IMAGE not in clean or name not in IMAGE_FIELDS:
                clean[name] = _array(field, value)
            elif name == MASK:
                mask = _decoded_mask(item, framing, recipe)
                clean[MASK], counts[MASK] = _mask(mask, framing, recipe)
                facts |= {SEVERAL_FRAMES: 1} if mask.has_several_frames else {}
            elif name == BOXES:
                boxes = _numbers(name, value)
                clean[BOXES], counts[BOXES] = _boxes(boxes, item.boxes_size, framing, recipe), len(boxes)
            else:
                points = _numbers(name, value)
                clean[KEYPOINTS], counts[KEYPOINTS] = _keypoints(points, field.shape[0], framing, recipe)
    return clean, counts, facts


def _check_names(names: Sequence[str], given: Collection[str]) -> None:
    for name in (*names, *given):
        if name not in given:
            raise refusal(f"has no field {name!r}, as other samples have")
        if name not in names:
            raise refusal(f"has a field {name!r}, unlike other samples")


def _image(field: Field, image: Array) -> Array:
    if image.dtype.str != field.dtype or image.shape != field.shape:
        raise refusal(
            f"its image is {image.dtype} with {image.shape[2]} channels, in other samples {np.dtype(field.dtype)} "
            f"with {field.shape[2]}: make all images alike, or use --mode rgb or grey"
        )
    return image


def _facts(framing: Framing, kind: str) -> Facts:
    (width, height), kind_name = framing.stored_as("displayed"), kind.partition(" ")[0].lower()
    turned = int(framing.turn != Turn())
    facts: Facts = {WIDTH: width, HEIGHT: height, TYPE: kind_name, TURNED: turned, MEAN: None, STD: None}
    return {**facts, SEVERAL_FRAMES: 1} if kind.endswith(SEVERAL) else facts


def _array(field: Field, value: bytes | Array) -> Array:
    dtype = np.dtype(field.dtype)
    if isinstance(value, bytes) or value.dtype.newbyteorder("<") != dtype or value.shape != field.shape:
        raise refusal(f"field {field.name!r} is {_kind(value)}, in other samples {dtype} {field.shape}")
    return np.ascontiguousarray(value, dtype)


def _decoded_mask(item: Item, framing: Framing, recipe: Recipe) -> DecodedMask:
    if item.mask_runs is None:
        return decode_turned_mask(item.fields[MASK], recipe)
    size = framing.stored_as(_coordinates(framing, recipe))
    return DecodedMask(draw_runs(item.mask_runs, size, item.runs_order))


def _mask(mask: DecodedMask, framing: Framing, recipe: Recipe) -> tuple[Array, int]:
    """Return a record's mask (height, width, 1), and 1 if the whole mask has any class but 0, else 0.

    Without `recipe.coordinates`, the mask may have the orientation of the stored or of the displayed image, and its
    size must show which.
    """
    stored, displayed = mask.classes, turn(mask.classes, TURNS[mask.orientation])
    readings = {"stored": stored, "displayed": turn_back(displayed, framing.turn)}
    stated = [readings[recipe.coordinates]] if recipe.coordinates else [*readings.values()]
    fitting = [each for each in stated if each.shape == framing.stored[::-1]]
    if not fitting:
        seen = recipe.coordinates or "displayed"
        height, width = (stored if seen == "stored" else displayed).shape
        image = " x ".join(map(str, framing.stored_as(seen)))
        raise refusal(f"the mask is {width} x {height} pixels, the image {image}: make their sizes equal")
    if not np.array_equal(fitting[0], fitting[-1]):
        raise refusal(
            "the image has an EXIF orientation, and the mask's size does not show which orientation the mask has; "
            f"{_UNSTATED}"
        )
    return framing.nearest(fitting[0])[..., None], int(stored.any())


def _numbers(name: str, value: bytes | Array) -> npt.NDArray[np.float64]:
    if isinstance(value, bytes) or value.dtype.kind not in "iuf":
        raise refusal(f"{name} must be an array of numbers, not {_kind(value)}")
    numbers = value.astype(np.float64)
    if not (np.abs(numbers) <= _FARTHEST).all():
        raise refusal(
            f"{name} hold numbers that are not finite, or beyond {_FARTHEST:,}: leave them out, or put them close to "
            "the image"
        )
    return numbers


def _coordinates(framing: Framing, recipe: Recipe) -> Coordinates:
    if recipe.coordinates is None and framing.turn != Turn():
        raise refusal(f"the image has an EXIF orientation, which its annotations may follow or not; {_UNSTATED}")
    return recipe.coordinates or "stored"


def _boxes(
    boxes: npt.NDArray[np.float64], size: tuple[int, int] | None, framing: Framing, recipe: Recipe
) -> npt.NDArray[np.float32]:
    most = recipe.max_boxes
    if not boxes.size:
        return fill_boxes(np.empty((0, 5)), most)
    if boxes.ndim != 2 or boxes.shape[1] not in (4, 5):
        raise refusal(f"boxes must have the shape (n, 4) or (n, 5), not {boxes.shape}")
    first, last, classes = boxes[:, :2], boxes[:, 2:4], boxes[:, 4:]
    for wrong in np.flatnonzero((last < first).any(axis=1)):
        raise refusal(f"box {wrong} has a negative width or height: {boxes[wrong, :4].tolist()}")
    for wrong in np.flatnonzero((classes < 0) | (classes % 1 != 0)):
        raise refusal(f"box {wrong} has the class {boxes[wrong, 4]:g}: give whole numbers from 0")
    if last.max() <= 1 and (boxes[:, :4] % 1).any() and max(framing.stored) > 1:
        raise refusal(
            f"its boxes, such as {boxes[0, :4].tolist()}, lie in one pixel: if they are fractions of the image, "
            "multiply them by its width and height"
        )
    coordinates = _coordinates(framing, recipe)
    if size is not None and not framing.is_of(size, coordinates):
        raise refusal(
            f"its boxes refer to {size[0]} x {size[1]} pixels, but its image has another size: scale the boxes"
        )
    corners = np.stack([framing.points(points, coordinates) for points in (first, last)])
    classes = classes if classes.size else np.zeros((len(boxes), 1))
    kept = clip_boxes(np.hstack([corners.min(axis=0), corners.max(axis=0), classes]), framing.area)
    if len(kept) > most:
        raise refusal(f"holds {len(kept)} boxes, more than --max-boxes {most}: give a larger number")
    return fill_boxes(kept, most)


def _keypoints(
    points: npt.NDArray[np.float64], count: int, framing: Framing, recipe: Recipe
) -> tuple[npt.NDArray[np.float32], int]:
    """Return the keypoints of a record, and how many of them lie in the source image."""
    if points.shape != (count, 2):
        raise refusal(f"field 'keypoints' has the shape {points.shape}, in other samples {(count, 2)}")
    coordinates = _coordinates(framing, recipe)
    moved = framing.points(points, coordinates).astype(np.float32)
    visible = within(moved, framing.area, framing.turn[1:] if coordinates == "stored" else (False, False))
    inside = within(points, (0, 0, *framing.stored_as(coordinates)))
    return mark_points(moved, visible, framing.area), int(inside.sum())


def count_annotations(arrays: Mapping[str, Array]) -> Counts:
    """Return how many annotations a record has, by field; empty without an image."""
    counts: Counts = {}
    for name in image_fields(arrays)[1:]:
        array = arrays[name]
        if name == MASK:
            found = array.any()
        elif name == BOXES:
            found = (array[:, 2:4] > array[:, :2]).all(axis=1).sum()
        else:
            found = (array[:, 2] > 0).sum()
        counts[name] = int(found)
    return counts
