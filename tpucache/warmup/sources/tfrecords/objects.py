"""The boxes of an Example in the schema of the TF Object Detection API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from tpucache.errors import SampleError
from tpucache.warmup.sources.base import Array

OBJECTS: Final = "image/object/"
LEFT: Final = f"{OBJECTS}bbox/xmin"
_CORNERS: Final = (LEFT, *(f"{OBJECTS}bbox/{name}" for name in ("ymin", "xmax", "ymax")))
#: The classes of the boxes, the first of these that there is: of that API, and of ImageNet's records.
_CLASSES: Final = (f"{OBJECTS}class/label", f"{OBJECTS}bbox/label")
_SIZE: Final = ("image/width", "image/height")


def read_boxes(numbers: Mapping[str, Array], path: str) -> tuple[Array, tuple[int, int]]:
    """Return boxes in pixels: float64 (n, 5) of left, top, right, bottom and class, or (n, 4) where there is no class.

    Behind them: the (width, height) of the image that they are of. The schema has corners as parts of these. Raises
    SampleError where parts are missing.
    """
    missing = [name for name in (*_CORNERS, *_SIZE) if name not in numbers]
    if missing:
        raise SampleError(path, f"has boxes but no feature {missing[0]!r}: leave them out with --drop '{OBJECTS}*'")
    classes = next((numbers[name] for name in _CLASSES if name in numbers), None)
    parts = [numbers[name].astype(np.float64) for name in _CORNERS]
    columns = parts if classes is None else [*parts, classes.astype(np.float64)]
    if len(set(map(len, columns))) > 1 or any(len(numbers[name]) != 1 for name in _SIZE):
        raise SampleError(path, f"has boxes of which some lack a corner or a class: {list(map(len, columns))} values")
    width, height = (int(numbers[name][0]) for name in _SIZE)
    boxes: Array = np.stack(columns, axis=1)
    boxes[:, :4] *= (width, height, width, height)
    return boxes, (width, height)
