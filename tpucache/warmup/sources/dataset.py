"""Samples of a map-style dataset, as torch and others have them: anything with a length and items by number."""

from __future__ import annotations

import dataclasses
import functools
import io
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpucache.callables import load_callable
from tpucache.errors import SampleError, SourceError
from tpucache.store.fields import IMAGE, MASK
from tpucache.warmup.sources.base import Array, Item, Label, Listing, Sample, SourceKind
from tpucache.warmup.sources.names import column_names, unique

if TYPE_CHECKING:
    from PIL.Image import Image

_LABELS: Final = ("label", "target", "labels", "targets")
_PIXELS: Final = (IMAGE, MASK)
_KEPT: Final = "give an image, numbers, or arrays of them; text only beside them"
#: Modes of PIL images that a PNG holds as they are, so that they are taken as those of a file are.
_PNG_MODES: Final = ("1", "L", "P", "RGB", "LA", "RGBA", "I;16")
_CALLABLE: Final = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")


class DatasetSource:
    """The items of the dataset that `module:callable` returns, called without arguments, once a process.

    An item is an image (array or PIL image), a dictionary, or a tuple of either and its label. In a dictionary
    `label`, `target`, `labels` or `targets` is the label, single numbers and text are columns (`path` is the column
    `id` where there is no `id`), and images, arrays, tensors and lists of numbers are arrays of their key's name.
    """

    def __init__(self, name: str) -> None:
        """Take `module:callable`; nothing is imported yet."""
        self._name = name

    def list(self) -> Listing:
        """Return all items as samples, named by the dataset's `paths` where it has them, else by number.

        Class names are its `classes`. Raises UsageError when the callable cannot be imported, SourceError when it
        returns no such dataset.
        """
        dataset = _dataset(self._name)
        names = _numbers(self._name) or map(str, range(len(dataset)))
        samples = [Sample(number, name) for number, name in enumerate(names)]
        return Listing(samples, _texts(dataset, "classes", self._name))

    def load(self, sample: Sample) -> Item:
        """Return an item's content. Raises SampleError when the dataset fails at it, or gives what cannot be kept."""
        dataset = _dataset(self._name)
        numbers = _numbers(self._name)
        try:
            value = dataset[numbers[sample.path] if numbers else int(sample.path)]
        except Exception as error:  # a user's dataset raises anything
            raise SampleError(sample.path, f"{self._name} raised {type(error).__name__}: {error}") from error
        if not isinstance(value, tuple):
            return _item(value, sample.path)
        if len(value) != 2:
            raise SampleError(sample.path, f"is a tuple of {len(value)}: give (item, label), or a dictionary")
        return dataclasses.replace(_item(value[0], sample.path), label=_label(value[1], "label", sample.path))


@functools.cache
def _dataset(name: str) -> Any:
    make = load_callable(name)
    try:
        dataset = make()
    except Exception as error:  # a user's code raises anything
        raise SourceError(f"{name} raised {type(error).__name__}: {error}") from error
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise SourceError(
            f"{name} returned a {type(dataset).__name__}: give a dataset with a length and items by number"
        )
    return dataset


@functools.cache
def _numbers(name: str) -> dict[str, int]:
    """Return the number of each item by its path; none where the dataset has no paths."""
    dataset = _dataset(name)
    paths = _texts(dataset, "paths", name)
    if paths and len(paths) != len(dataset):
        raise SourceError(f"{name}: the dataset has {len(dataset)} items but {len(paths)} paths: give each its own")
    return {path: number for number, path in enumerate(unique(paths))}


def _texts(dataset: Any, attribute: str, name: str) -> tuple[str, ...]:
    """Return the texts of a dataset's attribute; none where it has no such attribute."""
    values = getattr(dataset, attribute, None)
    if values is None:
        return ()
    if isinstance(values, (list, tuple, np.ndarray)) and all(isinstance(text, (str, Path)) for text in values):
        return tuple(map(str, values))
    raise SourceError(f"{name}: the dataset's {attribute} are a {type(values).__name__}: make them a list of texts")


def _item(value: Any, path: str) -> Item:
    if not isinstance(value, Mapping):
        return Item({IMAGE: _field(value, IMAGE, path)})
    for key in value:
        if not isinstance(key, str):
            raise SampleError(path, f"key {key!r} is a {type(key).__name__}: name every field by text")
    rest = dict(value)
    label_key = next((key for key in _LABELS if key in rest), None)
    label = None if label_key is None else _label(rest.pop(label_key), label_key, path)
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
    if key in _PIXELS and isinstance(value, bytes):
        return value
    if key in _PIXELS and _is_pil_image(value):
        return _pixels(value, key, path)
    return _array(value, key, path)


def _is_pil_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # whoever made such an image has imported it
    return pillow is not None and isinstance(value, pillow.Image)


def _pixels(image: Image, key: str, path: str) -> bytes | Array:
    """Return an image's pixels as they are: what is not plain grey or RGB as a PNG."""
    if image.mode not in _PNG_MODES:
        raise SampleError(path, f"{key!r} is a {image.mode} image: convert it to one of {', '.join(_PNG_MODES)}")
    try:
        if (key == MASK and image.mode == "P") or (image.mode in ("L", "RGB") and "transparency" not in image.info):
            return np.asarray(image)  # a PNG loses palette indices that are beyond the palette
        target = io.BytesIO()
        image.save(target, "PNG", compress_level=0, exif=b"")  # turned by its EXIF already, or meant as it is
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


def _label(value: Any, key: str, path: str) -> Label:
    if value is None:
        return None
    array = _array(value, key, path)
    if array.ndim > 1:
        raise SampleError(path, f"{key!r} has the shape {array.shape}: give a number, or one dimension of them")
    if array.ndim == 0 and array.dtype.kind != "f":
        return int(array)
    return tuple(map(float, array.reshape(-1).tolist()))


def _is_callable(source: str | Path) -> bool:
    return _CALLABLE.fullmatch(str(source)) is not None and not Path(source).exists()


KIND: Final = SourceKind("module:callable of a dataset", _is_callable, lambda source, _: DatasetSource(str(source)))
