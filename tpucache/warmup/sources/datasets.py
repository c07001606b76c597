"""DatasetSource: the items of a Python dataset, which is map-style (with a length and numbered items) or a stream.

PaddedSource pads sequences of different lengths to one length, and adds an attention mask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import logging
import pickle
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpucache.errors import DependencyError, SampleError, SourceError, UsageError
from tpucache.native import Array
from tpucache.plugins import load_callable
from tpucache.store.ahead import cached_for_threads
from tpucache.store.fields import BOXES, IMAGE, MASK
from tpucache.warmup.sources.columns import LABEL_NAMES, classes_of
from tpucache.warmup.sources.folder import read_sample
from tpucache.warmup.sources.kept import Copy
from tpucache.warmup.sources.source import (
    DerivedSource,
    Item,
    Items,
    Listing,
    Sample,
    Source,
    SourceKind,
    column_names,
    source_name,
    unique,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_CALLABLE: Final = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
#: The largest size of a pickled dataset, which is sent to the workers with each task.
_MOST_BYTES: Final = 16 << 20

_SAVED, _SAVED_SPLITS = ("state.json", "dataset_info.json"), "dataset_dict.json"

#: The field's name of an item that is only a sequence of numbers.
SEQUENCE: Final = "input_ids"
_PIXELS: Final = (IMAGE, MASK)
_PLURALS: Final = ("labels", "targets")  # with boxes, torchvision's models take one label for each
_KEPT: Final = "give an image, numbers, or arrays of numbers; text only in addition"
_TEXT: Final = (
    "give the image itself, not its path; give text as the numbers of a tokenizer: tokenise first, and give "
    "{'input_ids': [...], 'label': ...}"
)
#: Modes of PIL images that a PNG can hold unchanged, so that they are treated like those of a file.
_PNG_MODES: Final = ("1", "L", "P", "RGB", "LA", "RGBA", "I;16")
_TIFF_MODES: Final = ("CMYK", "LAB", "F", "I", "PA", "YCbCr")

ATTENTION: Final = "attention_mask"
#: Names of the main sequence: the first of these that exists, or else the first sequence of an item.
_MAIN: Final = (SEQUENCE, "ids", "tokens")
#: The column with the unpadded length of each sequence.
LENGTH: Final = "length"
_TRIED: Final = 8

_log: Final = logging.getLogger("tpucache")


class DatasetSource:
    """The items of a dataset, or of the result of `module:callable`, which each process calls once, without arguments.

    A stream, such as torch's IterableDataset, Hugging Face's stream, or a generator, is read once, when it is listed,
    and copied to this machine.

    An item is an image (array or PIL image), a sequence of numbers, a dictionary, or a tuple of one of these and its
    label. In a dictionary, the first of the keys `label`, `target`, `labels`, `targets`, `class` and `cls` is the
    label. Single numbers and text are columns (`path` becomes the column `id` if there is no `id`); images, arrays,
    tensors and lists of numbers are arrays named by their keys. An image may be `{"bytes": …}`, as in Hugging Face's
    datasets.
    """

    def __init__(self, dataset: str | Items) -> None:
        """Take a dataset, or `module:callable`, which is not imported yet.

        Raises UsageError for a dataset that cannot be sent to workers.
        """
        self._name = dataset if isinstance(dataset, str) else f"the {type(dataset).__name__}"
        self._stream = dataset if not isinstance(dataset, str) and is_stream(dataset) else None
        self._made_by: str | bytes = b""
        if self._stream is None:
            self._made_by = dataset if isinstance(dataset, str) else _pickled(dataset, self._name)
        self._copy: Copy | None = None
        self._copied: Sequence[Sample] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None, "_copied": ()}

    def __repr__(self) -> str:
        return self._name

    def list(self) -> Listing:
        """Return all items as samples.

        The dataset's attribute `paths` has the samples' paths. In a stream, or without this attribute, the path is the
        item's number. The class names are those of `class_names`, or of the label column of a Hugging Face dataset,
        whose labels are listed.
        """
        if self._stream is None:
            dataset, numbers = _made(self._made_by, self._name)
        else:
            dataset, numbers = _undecoded(self._stream), {}
        features = getattr(dataset, "features", None)
        features = features if isinstance(features, Mapping) else {}
        label = next((name for name in LABEL_NAMES if name in features), "")
        own, has_lists = classes_of(features.get(label))
        classes = class_names(dataset, self._name)
        if is_stream(dataset):
            if self._copy is None:
                self._copy = Copy(self._name)
                self._copied = self._copy.make(self._items(dataset))
            samples = self._copied
        else:
            names = numbers or map(str, range(len(dataset)))
            labels = _label_column(dataset, label) or itertools.repeat(None)
            samples = [Sample(number, *found) for number, found in enumerate(zip(names, labels, strict=False))]
        return Listing(samples, classes or own, has_class_lists=has_lists and not classes)

    def load(self, sample: Sample) -> Item:
        """Return its content."""
        if sample.fault:
            raise SampleError(sample.path, sample.fault)
        if self._copy is not None:
            return self._copy.load(sample.members[0])
        dataset, numbers = _made(self._made_by, self._name)
        try:
            value = dataset[numbers[sample.path] if numbers else int(sample.path)]
        except Exception as error:  # a user's dataset raises anything
            raise SampleError(sample.path, f"{self._name} raised {type(error).__name__}: {error}") from error
        return labelled_item(value, sample.path)

    def _items(self, stream: Any) -> Iterator[Item | SampleError]:
        done = 0
        try:
            for done, value in enumerate(stream, 1):
                try:
                    yield labelled_item(value, str(done - 1))
                except SampleError as error:
                    yield error
        except Exception as error:  # a user's stream raises anything
            raise SourceError(
                f"{self._name} raised {type(error).__name__} after {done:,} items: {error}. Run the same command again"
            ) from error


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be iterated: it is an IterableDataset, or it has no length."""
    is_named = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)  # torch's, Hugging Face's
    return hasattr(dataset, "__iter__") and (is_named or not hasattr(dataset, "__len__"))


def labelled_item(value: Any, path: str) -> Item:
    """Return the content of `value`, an item or a tuple of an item and its label."""
    if not isinstance(value, tuple):
        return to_item(value, path)
    if len(value) != 2:
        raise SampleError(path, f"is a tuple of {len(value)}: give (item, label), or a dictionary")
    return dataclasses.replace(to_item(value[0], path), label=to_label(value[1], "label", path))


def _pickled(dataset: Items, name: str) -> bytes:
    try:
        data = pickle.dumps(dataset)
    except Exception as error:  # a user's dataset raises anything
        raise UsageError(
            f"{name} cannot be sent to workers ({type(error).__name__}: {error}): give module:callable, a function "
            "that makes the dataset"
        ) from error
    if len(data) > _MOST_BYTES:
        raise UsageError(
            f"{name} takes {len(data):,} bytes to send to each worker: give module:callable, a function that makes it"
        )
    return data


@cached_for_threads(None)
def _made(made_by: str | bytes, name: str) -> tuple[Any, Mapping[str, int]]:
    """Return the dataset that a `module:callable` or a pickle makes, once in each process, and its items by path.

    There are no paths if the dataset has no attribute `paths`.
    """
    make = load_callable(made_by) if isinstance(made_by, str) else functools.partial(pickle.loads, made_by)
    try:
        dataset = make()
    except Exception as error:  # a user's code raises anything
        raise SourceError(f"{name} raised {type(error).__name__}: {error}") from error
    if not is_stream(dataset) and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise SourceError(
            f"{name} returned a {type(dataset).__name__}: give a dataset with a length and numbered items, or one to "
            "iterate"
        )
    dataset = _undecoded(dataset)
    paths = getattr(dataset, "paths", None)
    if paths is None:
        return dataset, {}
    if not isinstance(paths, (list, tuple, np.ndarray)) or not all(isinstance(path, (str, Path)) for path in paths):
        raise SourceError(f"{name}: the dataset's paths are a {type(paths).__name__}: make them a list of texts")
    if len(paths) != len(dataset):
        raise SourceError(f"{name}: the dataset has {len(dataset)} items and {len(paths)} paths: give each item a path")
    return dataset, {path: number for number, path in enumerate(unique(map(str, paths)))}


def _undecoded(dataset: Any) -> Any:
    """Make a Hugging Face dataset return images as the bytes of their files. Return any other dataset unchanged.

    A Hugging Face dataset with a format or a transform is returned unchanged, too. Images of a column that states a
    mode, such as `Image(mode="L")`, are left to the dataset, which converts them. A single column of images is renamed
    to `image`, and a single column of classes to `label`.
    """
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping) or not hasattr(dataset, "cast_column"):
        return dataset
    if getattr(dataset, "format", {}).get("type") is not None:  # the user transforms the items
        return dataset
    images = {name: feature for name, feature in features.items() if type(feature).__name__ == "Image"}
    for name, feature in images.items():
        if getattr(feature, "mode", None) is None:
            dataset = dataset.cast_column(name, type(feature)(decode=False))
    if len(images) == 1 and IMAGE not in features:
        dataset = dataset.rename_column(*images, IMAGE)
    classes = [name for name, feature in features.items() if classes_of(feature)[0]]
    if any(name in features for name in LABEL_NAMES) or not classes:
        return dataset
    if len(classes) > 1:
        raise SourceError(
            f"the dataset has several columns of classes, {', '.join(classes)}: rename the one that is the label, "
            f"`dataset.rename_column({classes[0]!r}, 'label')`"
        )
    return dataset.rename_column(*classes, "label")


def class_names(dataset: Any, name: str) -> tuple[str, ...]:
    """Return the names of the class numbers of a dataset that has any, else (); `name` is for the message.

    They are the attribute `classes` of the dataset, or of the one inside a torch Subset or ConcatDataset; without it,
    `class_to_idx`.
    """
    kind = type(dataset)
    if kind.__module__.startswith("torch.utils.data"):  # a subclass may number the labels anew
        if kind.__name__ == "Subset":
            return class_names(dataset.dataset, name)
        if (
            kind.__name__ == "ConcatDataset"
            and len(parts := {class_names(each, name) for each in dataset.datasets}) == 1
        ):
            return parts.pop()
    stated: Any = getattr(dataset, "classes", None)
    is_list = isinstance(stated, (list, tuple, np.ndarray)) and all(isinstance(each, str) for each in stated)
    names: tuple[str, ...] = tuple(map(str, stated)) if is_list and len({*stated}) == len(stated) else ()
    if stated is not None and not names:
        _log.warning("%s: its attribute classes is no list of different texts, and no names of classes", name)
    numbers = getattr(dataset, "class_to_idx", None)
    if not isinstance(numbers, Mapping) or {*numbers.values()} != {*range(len(numbers))}:
        return names  # a class may have several names
    ordered = tuple(map(str, sorted(numbers, key=numbers.__getitem__)))
    if names != ordered and {*names} == {*ordered}:
        wrong = next(number for number, pair in enumerate(zip(names, ordered, strict=True)) if pair[0] != pair[1])
        raise SourceError(
            f"{name}: class {wrong} is {names[wrong]!r} in the attribute classes and {ordered[wrong]!r} in "
            "class_to_idx: give both the same order"
        )
    return names or ordered


def _label_column(dataset: Any, name: str) -> list[Any]:
    """Return the column of labels of a Hugging Face dataset that has one and no transform; else []."""
    is_custom = getattr(dataset, "format", {}).get("type") == "custom" if name else True
    if is_custom or not hasattr(dataset, "with_format") or not hasattr(dataset, "__len__"):
        return []
    found = dataset.select_columns([name]).with_format(None)[:][name]
    return [tuple(label) if isinstance(label, list) else label for label in found]


KIND: Final = SourceKind(
    "module:callable of a dataset",
    lambda source: _CALLABLE.fullmatch(str(source)) is not None and not Path(source).exists(),
    lambda source, _: DatasetSource(str(source)),
)


def is_saved(source: str | Path) -> bool:
    """Return whether `source` is a folder that `save_to_disk` of Hugging Face's datasets wrote."""
    path = Path(source)
    return (path / _SAVED_SPLITS).is_file() or all((path / name).is_file() for name in _SAVED)


def load_saved(source: str | Path) -> Any:
    """Return the dataset that save_to_disk of Hugging Face's datasets wrote into the folder `source`."""
    path = Path(source).absolute()
    if (path / _SAVED_SPLITS).is_file():
        splits = sorted(each.name for each in path.iterdir() if (each / _SAVED[0]).is_file())
        commands = " and ".join(f"`warmup {path / split} CACHE/{split} …`" for split in splits)
        raise SourceError(f"{path} holds the splits {', '.join(splits)}: warm up each of them, {commands}")
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise DependencyError(
            "reading a folder that save_to_disk wrote needs the package datasets: `pip install datasets`"
        ) from error
    try:
        return load_from_disk(str(path))
    except Exception as error:  # the library may raise anything
        raise SourceError(f"{path} cannot be read as a dataset ({type(error).__name__}: {error})") from error


SAVED: Final = SourceKind(
    "a folder that save_to_disk of Hugging Face's datasets wrote",
    is_saved,
    lambda source, _: DatasetSource(load_saved(source)),
)


def to_item(value: Any, path: str) -> Item:
    """Return the content of an item, in one of the forms that `DatasetSource` describes."""
    if not isinstance(value, Mapping) or _is_encoded(value):
        single = _field(value, IMAGE, path)
        return Item({SEQUENCE if isinstance(single, np.ndarray) and single.ndim == 1 else IMAGE: single})
    if unnamed := [key for key in value if not isinstance(key, str)]:
        raise SampleError(path, f"key {unnamed[0]!r} is a {type(unnamed[0]).__name__}: name every field by text")
    rest = dict(value)
    label_key = next((key for key in LABEL_NAMES if key in rest), "")
    label = to_label(rest.pop(label_key), label_key, path) if label_key else None
    fields: dict[str, bytes | Array] = {}
    columns: dict[str, str | int | float] = {}
    for key, content in rest.items():
        field = content if isinstance(content, str) else _field(content, key, path)
        if isinstance(field, str):
            columns["id" if key == "path" and "id" not in rest else key] = str(field)
        elif isinstance(field, np.ndarray) and not field.ndim:
            columns[key] = float(field) if field.dtype.kind == "f" else int(field)
        else:
            fields[key] = field
    boxes = fields.get(BOXES)
    if label_key in _PLURALS and isinstance(label, tuple) and getattr(boxes, "shape", ()) == (len(label), 4):
        raise SampleError(
            path,
            f"has as many {label_key!r} as boxes: give the class of each box as the fifth number of its row, or "
            "call the labels of the image 'label'",
        )
    if not fields:
        advice = f": {_TEXT}" if any(isinstance(content, str) for content in rest.values()) else ""
        raise SampleError(path, f"has no image and no array among its keys {', '.join(value)}{advice}")
    safe = column_names(columns)
    return Item(fields, label, {safe[name]: content for name, content in columns.items()})


def _is_encoded(value: Any) -> bool:
    return isinstance(value, Mapping) and {"bytes"} <= {*value} <= {"bytes", "path"}


def _field(value: Any, key: str, path: str) -> bytes | Array:
    if key not in _PIXELS:
        return _array(value, key, path)
    if isinstance(value, bytes):
        return value
    if _is_encoded(value):
        if isinstance(value["bytes"], bytes) and value["bytes"]:
            return value["bytes"]
        if file := value.get("path"):
            return read_sample(Path(file), path)
        raise SampleError(path, f"{key!r} has neither bytes nor the path of a file")
    pillow = sys.modules.get("PIL.Image")  # a program that made a PIL image has imported it
    is_image = pillow is not None and isinstance(value, pillow.Image)
    return _pixels(value, key, path) if is_image else _array(value, key, path)


def _pixels(image: Image, key: str, path: str) -> bytes | Array:
    """Return an array, or the bytes of a PNG or TIFF for modes that an array alone does not describe."""
    mode, target = image.mode, io.BytesIO()
    if mode not in (*_PNG_MODES, *_TIFF_MODES):
        raise SampleError(
            path, f"{key!r} is a {mode} image: convert it to one of {', '.join((*_PNG_MODES, *_TIFF_MODES))}"
        )
    try:
        if mode == "YCbCr":  # some releases of Pillow cannot read the TIFF files of this mode that they write
            return np.asarray(image.convert("RGB"))
        is_plain = mode in ("L", "RGB") and "transparency" not in image.info
        if is_plain or (key == MASK and mode == "P" and np.asarray(image).max() >= len(image.getpalette() or ()) // 3):
            return np.asarray(image)  # a PNG would lose palette indices beyond the end of the palette
        # The image is turned by its EXIF already, or should not be turned.
        options: dict[str, Any] = {"format": "PNG", "compress_level": 0} if mode in _PNG_MODES else {"format": "TIFF"}
        image.save(target, exif=b"", **options)
    except Exception as error:  # an image that is decoded only now may raise any error of its decoder
        raise SampleError(path, f"{key!r} does not decode: {type(error).__name__}: {error}") from error
    return target.getvalue()


def _array(value: Any, key: str, path: str) -> Array:
    numpy = getattr(value, "numpy", None)  # of a tensor
    is_array = callable(numpy) or hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    if not is_array and not isinstance(value, (list, tuple, int, float)):
        raise SampleError(path, f"{key!r} is a {type(value).__name__}: {_TEXT if isinstance(value, str) else _KEPT}")
    try:
        array = np.asarray(numpy() if callable(numpy) else value)
    except Exception as error:  # a user's tensor raises anything
        raise SampleError(path, f"{key!r} cannot be made an array: {type(error).__name__}: {error}") from error
    if array.dtype.kind not in "biuf":
        raise SampleError(path, f"{key!r} is a {type(value).__name__} of dtype {array.dtype}: {_KEPT}")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def to_label(value: Any, key: str, path: str) -> Any:
    """Return a label: a class number or name, a tuple of numbers or names, or None."""
    if value is None or isinstance(value, str):
        return value if value is None or value.strip() else None
    if isinstance(value, (list, tuple)) and value and all(isinstance(part, str) for part in value):
        return tuple(part for part in value if part.strip())
    array = _array(value, key, path)
    if array.ndim > 1:
        raise SampleError(path, f"{key!r} has the shape {array.shape}: give a number, or a vector of numbers")
    is_single = array.size == 1 and not isinstance(value, (list, tuple))  # MedMNIST's labels have the shape (1,)
    if (array.ndim == 0 or is_single) and array.dtype.kind != "f":
        return int(array.reshape(()))
    return tuple(map(float, array.reshape(-1).tolist()))


def pad_source(source: Source, pad: int | None = None, truncate: bool = False) -> Source:
    """Return a source that pads sequences to `pad` numbers; None: as many as the longest has, which reading finds.

    `truncate` cuts longer sequences; without it, their samples do not load. Samples with an image are not changed.
    Raises UsageError for a `pad` below 1, and for `truncate` without `pad`.
    """
    if pad is not None and pad < 1:
        raise UsageError(f"pad is at least 1, not {pad}")
    if truncate and pad is None:
        raise UsageError("truncate needs a length to cut to: give --pad, too")
    return PaddedSource(source, pad, truncate)


@dataclasses.dataclass(repr=False)
class PaddedSource(DerivedSource):
    """The samples of another source; if they have no image, zeros are appended to their sequences.

    The main sequence is `input_ids`, `ids`, `tokens` or the first array of one dimension; all arrays of the same length
    are padded. A padded sample also has a column `length`, and a mask `attention_mask`, uint8 (length,) of 1 and 0,
    unless it has a field `attention_mask` or `mask`. If all sequences have the same length and `pad` is None, nothing
    changes. Call `list` before the source is sent to workers.
    """

    source: Source
    pad: int | None
    truncate: bool
    #: The length of padded sequences, and their dtypes by name, the main one first; {} if nothing is padded.
    length: int = 0
    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def list(self) -> Listing:
        """Return the listing of `source`."""
        listing = self.source.list()
        lengths = self._find_lengths(listing.samples)
        self.length = self.pad or max(lengths, default=0)
        if self.pad is None:
            self.dtypes = self.dtypes if len(lengths) > 1 else {}
            return listing
        if not self.dtypes:
            raise UsageError(f"{source_name(self.source)} has no sequences: leave out --pad")
        return dataclasses.replace(listing, asked={**listing.asked, "pad": self.pad, "truncate": self.truncate})

    def load(self, sample: Sample) -> Item:
        """Load a sample from `source`, and return its padded item."""
        item = self.source.load(sample)
        if not self.dtypes:
            return item
        arrays, main, length = _arrays(item), next(iter(self.dtypes)), self.length
        if main not in arrays:
            raise SampleError(sample.path, f"has no sequence {main!r}, as other samples have")
        own = len(arrays[main])
        if own > length and not self.truncate:
            raise SampleError(
                sample.path,
                f"{main!r} has {own:,} numbers: give --pad {own} or more, leave --pad out to pad to the longest "
                "sequence, or cut with --truncate",
            )
        fields = dict(item.fields)
        for name, dtype in self.dtypes.items():
            if name not in arrays or len(arrays[name]) != own:
                raise SampleError(sample.path, f"{name!r} is not a sequence of {own:,} numbers, like the main sequence")
            padded = np.zeros(length, arrays[name].dtype if own else dtype)  # an empty list has no dtype
            padded[:own] = arrays[name][:length]
            fields[name] = padded
        if not {ATTENTION, MASK} & {*fields}:
            fields[ATTENTION] = (np.arange(length) < own).astype(np.uint8)
        name = f"{LENGTH}_" if LENGTH in item.columns else LENGTH
        return dataclasses.replace(item, fields=fields, columns={**item.columns, name: own})

    def _find_lengths(self, samples: Sequence[Sample]) -> Collection[int]:
        """Find the `dtypes` of sequences, and return the lengths of the main one: in all samples if `pad` is None."""
        self.dtypes, main, lengths = {}, "", set[int]()
        for number, sample in enumerate(samples):
            if (number >= _TRIED and not any(lengths)) or (self.pad is not None and any(lengths)):
                break
            with contextlib.suppress(SampleError):
                item = self.source.load(sample)
                arrays = _arrays(item)
                if not any(lengths):  # empty lists do not show the dtype
                    if IMAGE in item.fields or not arrays:
                        return ()
                    main = next(name for name in (*_MAIN, *arrays) if name in arrays)
                    alike = [name for name in arrays if len(arrays[name]) == len(arrays[main])]
                    self.dtypes = {name: arrays[name].dtype.str for name in (main, *alike)}
                if main in arrays:
                    lengths.add(len(arrays[main]))
        return lengths


def _arrays(item: Item) -> dict[str, Array]:
    return {name: value for name, value in item.fields.items() if isinstance(value, np.ndarray) and value.ndim == 1}
