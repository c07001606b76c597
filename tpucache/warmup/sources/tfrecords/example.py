"""A serialised `tf.train.Example` -> an item, by the names and kinds of its features."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpucache.errors import DependencyError, SampleError
from tpucache.store.fields import BOXES, IMAGE, MASK
from tpucache.warmup.sources.base import Array, Item, Label
from tpucache.warmup.sources.names import column_names, field_names
from tpucache.warmup.sources.table import TableOptions
from tpucache.warmup.sources.tfrecords.objects import LEFT, OBJECTS, read_boxes

_IMAGES: Final = ("image", "image_raw", "image/encoded")
_LABELS: Final = ("class", "label", "target", "image/class/label")
_IMAGE_START: Final = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|BM.{4}\0{4}|II\*\0|MM\0\*|RIFF.{4}WEBP|\0{3}\x0cjP  |.{4}ftypavi[fs]",
    re.DOTALL,
)

_ANY: Final = TableOptions()
_INSTALL: Final = "`pip install --upgrade protobuf`"
#: Older ones have no such factory, or crash once the classes that it made for inner messages are collected.
_LEAST_PROTOBUF: Final = (4, 25)

_EXAMPLE: Final = """
name: "example.proto" package: "tpucache" syntax: "proto3"
message_type { name: "Bytes"  field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "Floats" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Ints"   field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes"  number: 1 type: TYPE_MESSAGE type_name: ".tpucache.Bytes"  oneof_index: 0 }
  field { name: "floats" number: 2 type: TYPE_MESSAGE type_name: ".tpucache.Floats" oneof_index: 0 }
  field { name: "ints"   number: 3 type: TYPE_MESSAGE type_name: ".tpucache.Ints"   oneof_index: 0 }
}
message_type {
  name: "Features"
  field {
    name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".tpucache.Features.FeatureEntry"
  }
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tpucache.Feature" }
  }
}
message_type {
  name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tpucache.Features" }
}
"""


def read_example(data: bytes, path: str, options: TableOptions = _ANY) -> Item:
    """Return what a serialised Example holds; `path` names it in errors.

    The image is the feature called image, image_raw or image/encoded, else the only one that begins as an image does;
    its mask is the one called mask. The label is what `options` name; by default the first numeric feature called
    class, label, target or image/class/label. One whole number is a class, others are a vector. In the schema of the TF
    Object Detection API, `image/object/bbox/…` are the boxes, with their class numbers, and nothing else below
    `image/object/` is kept. Of the other features, single values become columns (bytes as UTF-8 text), several numbers
    an array of int64 or float32, and empty ones nothing; their names are made plain, so that `image/class/text` becomes
    image_class_text.

    Raises SampleError when that cannot be done, DependencyError without protobuf.
    """
    texts, numbers = _features(data, path, options)
    fields: dict[str, bytes | Array] = {}
    image = _image_name(texts, path)
    if image is not None:
        fields[IMAGE] = _one(texts.pop(image), image, path)
        if MASK in texts:
            fields[MASK] = _one(texts.pop(MASK), MASK, path)
    label = _label(texts, numbers, options.label_cols, path)
    size = None
    if image is not None and LEFT in numbers:
        fields[BOXES], size = read_boxes(numbers, path)
        texts = {name: values for name, values in texts.items() if not name.startswith(OBJECTS)}
        numbers = {name: values for name, values in numbers.items() if not name.startswith(OBJECTS)}
    several = [name for name, values in numbers.items() if len(values) > 1 and options.is_kept(name)]
    arrays: dict[str, bytes | Array] = {safe: numbers[name] for name, safe in field_names(several).items()}
    if fields.keys() & arrays.keys():
        raise SampleError(path, f"has an image in feature {image!r}, and numbers in one called image")
    fields |= arrays
    if not fields:
        raise SampleError(path, f"has no image and no array among its features {', '.join([*texts, *numbers])}")
    columns: dict[str, str | int | float] = {
        name: values[0].item() for name, values in numbers.items() if len(values) == 1 and options.is_kept(name)
    }
    columns |= {
        name: _text(_one(values, name, path), name, path)
        for name, values in texts.items()
        if values and options.is_kept(name)
    }
    safe = column_names(sorted(columns))
    return Item(fields, label, {safe[name]: value for name, value in sorted(columns.items())}, boxes_size=size)


def are_marks(data: bytes, path: str, names: Sequence[str]) -> bool:
    """Return whether features of an Example are one whole number each, 0 or 1. Raises SampleError."""
    _, numbers = _features(data, path, _ANY)
    found = [numbers.get(name, np.empty(0)) for name in names]
    return all(len(values) == 1 and values.dtype == np.int64 and values[0] in (0, 1) for values in found)


def _features(data: bytes, path: str, options: TableOptions) -> tuple[dict[str, list[bytes]], dict[str, Array]]:
    """Return the features of bytes and those of numbers, in the order of their names, without dropped ones."""
    example_class, decode_error = _reader()
    try:
        example = example_class.FromString(data)
    except decode_error as error:
        raise SampleError(path, f"is no tf.train.Example: {error}") from error
    texts: dict[str, list[bytes]] = {}
    numbers: dict[str, Array] = {}
    for name, feature in sorted(example.features.feature.items()):
        kind = feature.WhichOneof("kind")
        if options.is_dropped(name):
            continue
        if kind == "bytes":
            texts[name] = list(feature.bytes.value)
        elif kind is not None:
            numbers[name] = np.array(getattr(feature, kind).value, np.int64 if kind == "ints" else np.float32)
    return texts, numbers


def _image_name(texts: dict[str, list[bytes]], path: str) -> str | None:
    for name in _IMAGES:
        if name in texts:
            return name
    like = [
        name for name, values in texts.items() if name != MASK and len(values) == 1 and _IMAGE_START.match(values[0])
    ]
    if len(like) > 1:
        raise SampleError(path, f"has several images, {', '.join(like)}, and none of them is called image")
    return like[0] if like else None


def _one(values: list[bytes], name: str, path: str) -> bytes:
    if len(values) != 1:
        raise SampleError(
            path, f"feature {name!r} has {len(values)} values: of bytes only one can be kept. --drop leaves it out"
        )
    return values[0]


def _text(value: bytes, name: str, path: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise SampleError(
            path, f"feature {name!r} is neither UTF-8 text nor called as an image is: --drop leaves it out"
        ) from error


def _label(texts: Mapping[str, Any], numbers: dict[str, Array], names: Sequence[str], path: str) -> Label:
    """Take the label out of the numbers, and return it."""
    if not names:
        names = [name for name in _LABELS if name in numbers][:1]
    for name in names:
        if name in texts:
            raise SampleError(
                path, f"feature {name!r} is text: the labels of TFRecords are numbers, name such a feature"
            )
        if name not in numbers:
            raise SampleError(path, f"has no feature {name!r}: there are {', '.join([*texts, *numbers])}")
        if not len(numbers[name]):
            raise SampleError(path, f"feature {name!r} is empty: it has no label")
    values = [numbers.pop(name) for name in names]
    if len(values) == 1 and len(values[0]) == 1 and values[0].dtype == np.int64:
        return int(values[0][0])
    several = next((name for name, value in zip(names, values, strict=True) if len(names) > 1 != len(value)), None)
    if several is not None:
        raise SampleError(path, f"feature {several!r} has several values: of several label features each has one")
    return tuple(np.concatenate(values).astype(np.float64).tolist()) if values else None


@functools.cache
def _reader() -> tuple[Any, Any]:
    """Return the class of `tf.train.Example`, in a pool of its own as TensorFlow may be loaded too, and its error."""
    try:
        from google.protobuf import __version__ as version
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise DependencyError(f"TFRecord files need protobuf: {_INSTALL}") from error
    if tuple(map(int, version.split(".")[:2])) < _LEAST_PROTOBUF:
        raise DependencyError(f"protobuf {version} is too old to read TFRecord files safely: {_INSTALL}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tpucache.Example")), DecodeError
