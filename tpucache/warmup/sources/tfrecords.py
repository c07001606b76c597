"""Reads samples from TFRecord files, in which each record is a serialised `tf.train.Example`, without TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DependencyError, SampleError, SourceError
from tpucache.native import Array
from tpucache.progress import Progress
from tpucache.store.ahead import open_scanned
from tpucache.store.fields import BOXES, IMAGE, MASK
from tpucache.store.files import open_file
from tpucache.warmup.sources.columns import TableOptions, tell_of_others
from tpucache.warmup.sources.folder import find_shards
from tpucache.warmup.sources.source import (
    Item,
    Listing,
    Sample,
    SourceKind,
    cached_until_changed,
    column_names,
    field_names,
    has_wildcard,
    spellings,
    split_pattern,
)

#: The suffixes of TFRecord files; `-00000-of-00010` may follow.
_NAMES: Final = re.compile(r"(\.(tfrec|tfrecord|tfrecords)(-\d+-of-\d+)?|-\d{5}-of-\d{5})$", re.IGNORECASE)

# A record is its length (u64), the length's checksum (u32), its data, and the data's checksum (u32), little-endian.
_HEADER: Final = 12
_FRAME: Final = 16
_LOOKED_AT: Final = 8  # this many records are read to find the names of features

_IMAGES: Final = ("image", "image_raw", "image/encoded")
_LABELS: Final = ("class", "label", "target", "image/class/label")
_IMAGE_START: Final = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|BM.{4}\0{4}|II\*\0|MM\0\*|RIFF.{4}WEBP|\0{3}\x0cjP  |.{4}ftypavi[fs]",
    re.DOTALL,
)

_ANY: Final = TableOptions()
_INSTALL: Final = "`pip install --upgrade protobuf`"
#: Older releases have no such factory, or crash when its classes for inner messages are garbage-collected.
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
message_type { name: "FeatureList" }
message_type {
  name: "FeatureLists"
  field {
    name: "list" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".tpucache.FeatureLists.ListEntry"
  }
  nested_type {
    name: "ListEntry"
    options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".tpucache.FeatureList" }
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".tpucache.Features" }
  field { name: "lists"    number: 2 type: TYPE_MESSAGE type_name: ".tpucache.FeatureLists" }
}
"""

OBJECTS: Final = "image/object/"
LEFT: Final = f"{OBJECTS}bbox/xmin"
_CORNERS: Final = (LEFT, *(f"{OBJECTS}bbox/{name}" for name in ("ymin", "xmax", "ymax")))
#: Features with the classes of boxes, in the Object Detection API and in ImageNet's records; the first is preferred.
_CLASSES: Final = (f"{OBJECTS}class/label", f"{OBJECTS}bbox/label")
_LARGEST_CORNER: Final = 1.1  # as in the Object Detection API; larger corners are pixels
_CLASS_NAMES: Final = f"{OBJECTS}class/text"
_CROWDS: Final = f"{OBJECTS}is_crowd"  # 1 for the box of a crowd
_SIZE: Final = ("image/width", "image/height")

#: The values of each feature of an Example: bytes, or an array of int64 or float32.
Features = dict[str, Any]

_log: Final = logging.getLogger("tpucache")


class TFRecordSource:
    """The records of TFRecord files, file by file, sorted by the bytes of file names. Compressed files are refused."""

    def __init__(self, pattern: str | Path, options: TableOptions | None = None) -> None:
        """Take a file or a pattern with the wildcards `*`, `**`, `?` and `[…]`, and options for its features."""
        self._options = options or TableOptions()
        self._root, self._pattern = split_pattern(pattern)

    def __repr__(self) -> str:
        return str(self._root / self._pattern)

    def list(self) -> Listing:
        """Return all records as samples, with paths such as `file#record`."""
        samples: list[Sample] = []
        with Progress(None, "list", "records", is_brief=True) as progress:
            for path in find_shards(self._root, self._pattern):
                if not _NAMES.search(path.name):
                    raise SourceError(
                        f"{self._root / path} is not called .tfrec, .tfrecord or .tfrecords: "
                        "give a pattern that matches only such files, and decompress compressed ones"
                    )
                bounds = _bounds_of(self._root / path).tolist()
                samples += [
                    Sample(len(samples) + record, f"{path.as_posix()}#{record}", None, end - start - _FRAME)
                    for record, (start, end) in enumerate(itertools.pairwise(bounds))
                ]
                progress.advance(len(bounds) - 1)
        if not samples:
            raise SourceError(f"{self} holds no records")
        few = list[Features]()
        for sample in samples[:: max(1, len(samples) // _LOOKED_AT)]:
            with contextlib.suppress(SampleError):
                few.append(_features(_parse(self._data(sample.path), sample.path), self._options))
        self._tell_of_features(few)
        names = sorted({name for features in few for name in features})
        return Listing(samples, value_names=self._options.label_cols, spellings=spellings(names))

    def load(self, sample: Sample) -> Item:
        """Return its content."""
        return read_example(self._data(sample.path), sample.path, self._options)

    def _tell_of_features(self, few: Sequence[Features]) -> None:
        """Warn of boxes and features that are left out, and if more than one feature could be the label by its name."""
        filled = [{name for name, values in features.items() if len(values)} for features in few]
        if any(_CROWDS in names for names in filled):  # not counted, because that would read all records twice
            _log.warning("%s: boxes of crowds, those whose %r is not 0, are left out", self, _CROWDS)
        objects = {name for names in filled if LEFT in names for name in names if name.startswith(OBJECTS)}
        if unread := objects - {*_CORNERS, *_CLASSES, _CLASS_NAMES, _CROWDS}:
            shown = ", ".join(map(repr, sorted(unread)))
            _log.warning(
                "%s: of objects, only boxes and their classes are read, not %s: they are left out", self, shown
            )
        if self._options.label_cols:
            return
        used = sorted({name for features in few for name in _found_label(features)})
        if len(used) == 1:
            tell_of_others(repr(self), [*used, *sorted(set().union(*filled) & {*_LABELS} - {*used})])
        elif used:
            _log.warning(
                "%s: the label of some records is feature %r, of others %r: name the right one with --label-col",
                self, *used[:2],
            )  # fmt: skip

    def _data(self, name: str) -> bytes:
        file_name, _, record = name.rpartition("#")
        path, number = self._root / file_name, int(record)
        try:
            start, end = _bounds_of(path)[number : number + 2].tolist()
            with open_file(path) as file:
                file.seek(start)
                frame = file.read(end - start)
        except ValueError as error:
            raise SampleError(name, "is no longer in its file, which holds fewer records now") from error
        except (OSError, SourceError) as error:
            raise SampleError(name, f"cannot be read any more: {error}") from error
        data = frame[_HEADER:-4]
        if not _intact(data, frame[-4:]):
            raise SampleError(name, "is damaged: its data does not match its checksum")
        return data


@cached_until_changed(64)
def _bounds_of(path: Path) -> npt.NDArray[np.int64]:
    """Return where the records of a file begin, and its end."""
    size = path.stat().st_size
    bounds = [0]
    with open_scanned(path) as file:
        while (start := bounds[-1]) < size:
            file.seek(start)
            header = file.read(_HEADER)
            end = start + _FRAME + int.from_bytes(header[:8], "little")
            if len(header) == _HEADER and not _intact(header[:8], header[8:]):
                raise SourceError(
                    f"{path}, offset {start}: no record begins here, or its length is damaged: give an undamaged "
                    "TFRecord file, and decompress a compressed one"
                )
            if len(header) < _HEADER or end > size:
                raise SourceError(f"{path}, offset {start}: the record is cut off: copy the whole file again")
            bounds.append(end)
    return np.array(bounds, np.int64)


def _intact(data: bytes, stored: bytes) -> bool:
    crc = _crc32c().value(data)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return bool(masked == int.from_bytes(stored, "little"))


@functools.cache
def _crc32c() -> Any:
    try:
        import google_crc32c
    except ImportError as error:
        raise DependencyError("TFRecord files need google-crc32c: `pip install google-crc32c`") from error
    return google_crc32c


def _is_tfrecord(source: str | Path) -> bool:
    path = Path(source)
    if path.exists():
        return path.is_file() and _NAMES.search(path.name.removesuffix(".gz")) is not None
    return has_wildcard(str(source))


KIND: Final = SourceKind(
    "TFRecord files (one, or a pattern such as 'train-*.tfrec')",
    _is_tfrecord,
    TFRecordSource,
    frozenset(("label_cols", "keep", "drop")),
)


def read_example(data: bytes, path: str, options: TableOptions = _ANY) -> Item:
    """Return the content of a serialised Example; `path` names it in errors.

    The image is the feature called image, image_raw or image/encoded, else the only one that begins like an image file.
    Its mask is the feature called mask. `options` name the label; by default it is the first numeric feature called
    class, label, target or image/class/label, or else the first text with such a name, which is the name of a class.
    One whole number is a class, other numbers are a vector. In the schema of the TF Object Detection API,
    `image/object/bbox/…` are the boxes, with their class numbers; all other features in `image/object/` are dropped.
    Other features become columns if they have a single value (bytes as UTF-8 text), or arrays of int64 or float32 if
    they have several numbers; empty features are left out. Names are made plain: `image/class/text` becomes
    image_class_text. A SequenceExample, whose context is read as an Example, is refused if it has feature lists that
    are not dropped.
    """
    example = _parse(data, path)
    if lists := [name for name in sorted(example.lists.list) if options.is_kept(name)]:
        raise SampleError(
            path,
            f"is a tf.train.SequenceExample whose feature lists are not read, such as {lists[0]!r}: write them as "
            f"features of a tf.train.Example, or leave them out with --drop {lists[0]!r}",
        )
    features = _features(example, options)
    fields: dict[str, bytes | Array] = {}
    image = _image_name(features, path)
    if image is not None:
        fields[IMAGE] = _one(features.pop(image), image, path)
        if isinstance(features.get(MASK), list):
            fields[MASK] = _one(features.pop(MASK), MASK, path)
    label = _label(features, options.label_cols, path)
    size = None
    if image is not None and LEFT in features:
        fields[BOXES], size = read_boxes(features, path)
        features = {name: values for name, values in features.items() if not name.startswith(OBJECTS)}
    kept = {name: values for name, values in features.items() if len(values) and options.is_kept(name)}
    several = {name: values for name, values in kept.items() if isinstance(values, np.ndarray) and len(values) > 1}
    arrays = {safe: several[name] for name, safe in field_names(several).items()}
    if fields.keys() & arrays.keys():
        raise SampleError(path, f"has an image in feature {image!r}, and numbers in a feature called image: rename one")
    fields |= arrays
    if not fields:
        raise SampleError(path, f"has no image and no array among its features {', '.join(features)}")
    columns: dict[str, str | int | float] = {
        name: values[0].item() if isinstance(values, np.ndarray) else _text(_one(values, name, path), name, path)
        for name, values in sorted(kept.items())
        if name not in several
    }
    safe = column_names(columns)
    return Item(fields, label, {safe[name]: value for name, value in columns.items()}, boxes_size=size)


def _parse(data: bytes, path: str) -> Any:
    example_class, decode_error = _reader()
    try:
        return example_class.FromString(data)
    except decode_error as error:
        raise SampleError(path, f"is not a tf.train.Example: {error}") from error


def _features(example: Any, options: TableOptions) -> Features:
    """Return the features that are not dropped, sorted by name: first those of bytes, then those of numbers."""
    texts: Features = {}
    numbers: Features = {}
    for name, feature in sorted(example.features.feature.items()):
        kind = feature.WhichOneof("kind")
        if kind is None or options.is_dropped(name):
            continue
        values = getattr(feature, kind).value
        if kind == "bytes":
            texts[name] = list(values)
        else:
            numbers[name] = np.array(values, np.int64 if kind == "ints" else np.float32)
    return texts | numbers


def _image_name(features: Features, path: str) -> str | None:
    texts = {name: values for name, values in features.items() if isinstance(values, list)}
    for name in _IMAGES:
        if name in texts:
            return name
    like = [
        name for name, values in texts.items() if name != MASK and len(values) == 1 and _IMAGE_START.match(values[0])
    ]
    if len(like) > 1:
        raise SampleError(path, f"has several images, {', '.join(like)}, and none of them is called image: rename one")
    return like[0] if like else None


def _one(values: list[bytes], name: str, path: str) -> bytes:
    if len(values) != 1:
        raise SampleError(
            path,
            f"feature {name!r} has {len(values)} values: only one value of bytes can be kept. --drop leaves it out",
        )
    return values[0]


def _text(value: bytes, name: str, path: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise SampleError(
            path,
            f"feature {name!r} is not UTF-8 text: leave it out with --drop {name!r}, or rename it to image if it is "
            "the record's image",
        ) from error


def _found_label(features: Features) -> list[str]:
    """Return the name of the label by default: numbers are preferred to texts."""
    named: list[str] = [name for name in _LABELS if name in features]
    numbers = [name for name in named if isinstance(features[name], np.ndarray)]
    return (numbers or [name for name in named if features[name]])[:1]


def _label(features: Features, names: Sequence[str], path: str) -> Any:
    """Remove the features `names`, or the default label, and return their values as the raw label, None without one."""
    chosen = names or _found_label(features)
    if missing := [name for name in chosen if name not in features]:
        raise SampleError(path, f"has no feature {missing[0]!r}: there are {', '.join(features)}")
    found: list[float] = []
    for name in chosen:
        values = features.pop(name)
        if isinstance(values, list):
            if len(names) > 1:
                raise SampleError(
                    path, f"feature {name!r} is text: if there are several label features, all must be numbers"
                )
            labels = tuple(label for value in values if (label := _text(value, name, path)).strip())
            return labels[0] if len(labels) == 1 else labels or None
        if not len(values):
            raise SampleError(path, f"feature {name!r} is empty, so that the record has no label")
        if len(names) > 1 != len(values):
            raise SampleError(
                path, f"feature {name!r} has several values: each of several label features may have only one"
            )
        if len(values) == 1 and len(names) < 2 and values.dtype == np.int64:
            return values[0].item()
        found += values.tolist()
    return tuple(map(float, found)) or None


@functools.cache
def _reader() -> tuple[Any, Any]:
    """Return protobuf's class for `tf.train.Example`, and its error class.

    The class has its own descriptor pool, because TensorFlow may have registered the same names in the default pool.
    """
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


def read_boxes(features: Mapping[str, Any], path: str) -> tuple[Array, tuple[int, int]]:
    """Return boxes in pixels, and the (width, height) of their image.

    Boxes are float64 (n, 5) of left, top, right, bottom and class, or (n, 4) without a class. The TF Object Detection
    API stores corners as fractions of the image's width and height. As in COCO JSON files, the boxes of crowds are left
    out.
    """
    if missing := [name for name in (*_CORNERS, *_SIZE) if name not in features]:
        raise SampleError(path, f"has boxes but no feature {missing[0]!r}: leave boxes out with --drop '{OBJECTS}*'")
    classes = [features[name] for name in _CLASSES if name in features][:1]
    if not classes and _CLASS_NAMES in features:
        raise SampleError(
            path,
            f"has the classes of boxes only as texts: write their numbers as {_CLASSES[0]!r}, or give "
            f"--drop {_CLASS_NAMES} to leave the classes out",
        )
    crowds = features.get(_CROWDS, ())
    columns = [column.astype(np.float64) for column in (*(features[name] for name in _CORNERS), *classes)]
    if several := [name for name in _SIZE if len(features[name]) != 1]:
        raise SampleError(path, f"has {len(features[several[0]])} values of {several[0]!r} in place of one")
    counts = [*map(len, columns), *([len(crowds)] if len(crowds) else [])]
    if len({*counts}) > 1:
        raise SampleError(
            path, f"has boxes without a corner, a class or a {_CROWDS!r}: their features have {counts} values"
        )
    width, height = (int(features[name][0]) for name in _SIZE)
    boxes: Array = np.stack(columns, axis=1)
    if (boxes[:, :4] > _LARGEST_CORNER).any():
        raise SampleError(
            path,
            f"has a box corner of {boxes[:, :4].max():g}: corners must be fractions of the image's width and height",
        )
    boxes[:, :4] *= (width, height, width, height)
    return (boxes[np.equal(crowds, 0)] if len(crowds) else boxes), (width, height)
