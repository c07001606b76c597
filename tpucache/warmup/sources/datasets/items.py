"""An item of a dataset -> the fields, label and columns of a sample."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpucache.errors import SampleError
from tpucache.store.fields import IMAGE, MASK
from tpucache.warmup.sources.base import Array, Item, Label
from tpucache.warmup.sources.folder import read_file
from tpucache.warmup.sources.names import column_names

if TYPE_CHECKING:
    from PIL.Image import Image

LABELS: Final = ("label", "target", "labels", "targets")
#: What a sequence of numbers alone is called.
SEQUENCE: Final = "input_ids"
_PIXELS: Final = (IMAGE, MASK)
_KEPT: Final = "give an image, numbers, or arrays of them; text only beside them"
#: Modes of PIL images that a PNG holds as they are, so that they are taken as those of a file are.
_PNG_MODES: Final = ("1", "L", "P", "RGB", "LA", "RGBA", "I;16")
_TIFF_MODES: Final = ("CMYK", "LAB", "F", "I", "PA")
_YCBCR: Final = "YCbCr"  # some releases of Pillow cannot read the TIFF that they write of it


def to_item(value: Any, path: str) -> Item:
    """Return what an item holds, as `DatasetSource` describes it. Raises SampleError for what cannot be kept."""
    if not isinstance(value, Mapping) or _is_encoded(value):
        single = _field(value, IMAGE, path)
        is_sequence = isinstance(single, np.ndarray) and single.ndim == 1
        return Item({SEQUENCE if is_sequence else IMAGE: single})
    for key in value:
        if not isinstance(key, str):
            raise SampleError(path, f"key {key!r} is a {type(key).__name__}: name every field by text")
    rest = dict(value)
    label_key = next((key for key in LABELS if key in rest), None)
    label = None if label_key is None else to_label(rest.pop(label_key), label_key, path)
    fields: dict[str, bytes | Array] = {}
    columns: dict[str, str | int | float] = {}
    for key, content in rest.items():
        field = content if isinstance(content, str) else _field(content, key, path)
        if isinstance(field, str) or (isinstance(field, np.ndarray) and not field.ndim):
            name = "id" if key == "path" and isinstance(field, str) and "id" not in rest else key
            columns[name] = str(field) if isinstance(field, str) else _scalar(field)
        else:
            fields[key] = field
    if not fields:
        raise SampleError(path, f"has no image and no array among its keys {', '.join(value)}")
    safe = column_names(columns)
    return Item(fields, label, {safe[name]: content for name, content in columns.items()})


def _field(value: Any, key: str, path: str) -> bytes | Array:
    if key in _PIXELS and isinstance(value, Mapping) and _is_encoded(value):
        return _encoded(value, key, path)
    if key in _PIXELS and isinstance(value, bytes):
        return value
    if key in _PIXELS and _is_pil_image(value):
        return _pixels(value, key, path)
    return _array(value, key, path)


def _is_encoded(value: Mapping[Any, Any]) -> bool:
    """Return whether a dictionary is an image as Hugging Face has it undecoded."""
    return {"bytes"} <= set(value) <= {"bytes", "path"}


def _encoded(value: Mapping[Any, Any], key: str, path: str) -> bytes:
    data, file = value["bytes"], value.get("path")
    if isinstance(data, bytes) and data:
        return data
    if isinstance(file, (str, Path)) and str(file):
        return read_file(Path(file), path)
    raise SampleError(path, f"{key!r} has neither bytes nor the path of a file")


def _is_pil_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # whoever made such an image has imported it
    return pillow is not None and isinstance(value, pillow.Image)


def _pixels(image: Image, key: str, path: str) -> bytes | Array:
    """Return an image's pixels as they are: what is not plain grey or RGB as a PNG or TIFF, to be decoded as a file."""
    if image.mode not in (*_PNG_MODES, *_TIFF_MODES, _YCBCR):
        known = ", ".join((*_PNG_MODES, *_TIFF_MODES, _YCBCR))
        raise SampleError(path, f"{key!r} is a {image.mode} image: convert it to one of {known}")
    try:
        if (key == MASK and image.mode == "P") or (image.mode in ("L", "RGB") and "transparency" not in image.info):
            return np.asarray(image)  # a PNG loses palette indices that are beyond the palette
        if image.mode == _YCBCR:
            return np.asarray(image.convert("RGB"))
        target = io.BytesIO()
        options: dict[str, Any] = {"compress_level": 0} if image.mode in _PNG_MODES else {}
        # The image is turned by its EXIF already, or meant as it is.
        image.save(target, "PNG" if image.mode in _PNG_MODES else "TIFF", exif=b"", **options)
    except Exception as error:  # an image that is decoded only now raises what its decoder raises
        raise SampleError(path, f"{key!r} does not decode: {type(error).__name__}: {error}") from error
    return target.getvalue()


def _array(value: Any, key: str, path: str) -> Array:
    """Return numbers as an array of their own dtype, little-endian; a single number has no dimensions."""
    numpy = getattr(value, "numpy", None)  # of a tensor
    like_array = hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    if not (callable(numpy) or like_array or isinstance(value, (list, tuple, int, float))):
        raise SampleError(path, f"{key!r} is a {type(value).__name__}: {_KEPT}")
    try:
        array = np.asarray(numpy() if callable(numpy) else value)
    except Exception as error:  # a user's tensor raises anything
        raise SampleError(path, f"{key!r} makes no array: {type(error).__name__}: {error}") from error
    if array.dtype.kind not in "biuf":
        raise SampleError(path, f"{key!r} is a {type(value).__name__} of dtype {array.dtype}: {_KEPT}")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _scalar(array: Array) -> int | float:
    return float(array) if array.dtype.kind == "f" else int(array)


def to_label(value: Any, key: str, path: str) -> Label:
    """Return a label: a class number, numbers, or None. Raises SampleError for anything else."""
    if value is None:
        return None
    array = _array(value, key, path)
    if array.ndim > 1:
        raise SampleError(path, f"{key!r} has the shape {array.shape}: give a number, or one dimension of them")
    if array.ndim == 0 and array.dtype.kind != "f":
        return int(array)
    return tuple(map(float, array.reshape(-1).tolist()))
