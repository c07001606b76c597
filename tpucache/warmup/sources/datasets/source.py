"""Samples of a map-style dataset, as torch and others have them: anything with a length and items by number."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.imports import load_callable
from tpucache.store.fields import IMAGE
from tpucache.warmup.sources.base import Item, Items, Listing, Sample, SourceKind
from tpucache.warmup.sources.datasets.items import LABELS, to_item, to_label
from tpucache.warmup.sources.names import unique

_CALLABLE: Final = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
#: How large a pickled dataset may be: it is sent to the workers with each of their tasks.
_MOST_BYTES: Final = 16 << 20


class DatasetSource:
    """The items of a dataset, or of what `module:callable` returns, called without arguments, once a process.

    An item is an image (array or PIL image), a sequence of numbers, a dictionary, or a tuple of one of these and its
    label. In a dictionary `label`, `target`, `labels` or `targets` is the label, single numbers and text are columns
    (`path` is the column `id` where there is no `id`), and images, arrays, tensors and lists of numbers are arrays of
    their key's name. An image may be `{"bytes": …}`, as Hugging Face has it.
    """

    def __init__(self, dataset: str | Items) -> None:
        """Take `module:callable`, of which nothing is imported yet, or a dataset. Raises UsageError."""
        self._name = dataset if isinstance(dataset, str) else f"the {type(dataset).__name__}"
        self._dataset: str | bytes = dataset if isinstance(dataset, str) else _pickled(dataset, self._name)

    def __repr__(self) -> str:
        return self._name

    def list(self) -> Listing:
        """Return all items as samples, named by the dataset's `paths` where it has them, else by number.

        Class names are its `classes`, or those of the label in Hugging Face's `features`. Raises UsageError when the
        callable cannot be imported, SourceError when it returns no such dataset.
        """
        dataset = _dataset(self._dataset, self._name)
        names = _numbers(self._dataset, self._name) or map(str, range(len(dataset)))
        samples = [Sample(number, name) for number, name in enumerate(names)]
        return Listing(samples, _texts(dataset, "classes", self._name) or _feature_names(dataset))

    def load(self, sample: Sample) -> Item:
        """Return an item's content. Raises SampleError when the dataset fails at it, or gives what cannot be kept."""
        dataset = _dataset(self._dataset, self._name)
        numbers = _numbers(self._dataset, self._name)
        try:
            value = dataset[numbers[sample.path] if numbers else int(sample.path)]
        except Exception as error:  # a user's dataset raises anything
            raise SampleError(sample.path, f"{self._name} raised {type(error).__name__}: {error}") from error
        if not isinstance(value, tuple):
            return to_item(value, sample.path)
        if len(value) != 2:
            raise SampleError(sample.path, f"is a tuple of {len(value)}: give (item, label), or a dictionary")
        return dataclasses.replace(to_item(value[0], sample.path), label=to_label(value[1], "label", sample.path))


def _pickled(dataset: Items, name: str) -> bytes:
    try:
        data = pickle.dumps(dataset)
    except Exception as error:  # a user's dataset raises anything
        raise UsageError(
            f"{name} cannot be sent to workers ({type(error).__name__}: {error}): give module:callable of a function "
            "that makes it"
        ) from error
    if len(data) > _MOST_BYTES:
        raise UsageError(
            f"{name} takes {len(data):,} bytes to send to each worker: give module:callable of a function that makes it"
        )
    return data


@functools.cache
def _dataset(made_by: str | bytes, name: str) -> Any:
    """Return the dataset that a callable makes, or that was pickled, once a process."""
    make = load_callable(made_by) if isinstance(made_by, str) else functools.partial(pickle.loads, made_by)
    try:
        dataset = make()
    except Exception as error:  # a user's code raises anything
        raise SourceError(f"{name} raised {type(error).__name__}: {error}") from error
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise SourceError(
            f"{name} returned a {type(dataset).__name__}: give a dataset with a length and items by number"
        )
    return _undecoded(dataset)


def _undecoded(dataset: Any) -> Any:
    """Return a dataset of Hugging Face with its images as the bytes of their files, which are decoded as files are.

    A single column of images is the image, whatever it is called.
    """
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping) or not hasattr(dataset, "cast_column"):
        return dataset
    if getattr(dataset, "format", {}).get("type") is not None:  # the user transforms the items
        return dataset
    images = {name: type(feature) for name, feature in features.items() if type(feature).__name__ == "Image"}
    for name, kind in images.items():
        dataset = dataset.cast_column(name, kind(decode=False))
    if len(images) == 1 and IMAGE not in features:
        dataset = dataset.rename_column(*images, IMAGE)
    return dataset


@functools.cache
def _numbers(made_by: str | bytes, name: str) -> dict[str, int]:
    """Return the number of each item by its path; none where the dataset has no paths."""
    dataset = _dataset(made_by, name)
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


def _feature_names(dataset: Any) -> tuple[str, ...]:
    """Return the class names of the label in a dataset of Hugging Face; none for any other."""
    features = getattr(dataset, "features", None)
    if not isinstance(features, Mapping):
        return ()
    label = next((features[name] for name in LABELS if name in features), None)
    return tuple(getattr(label, "names", None) or ())


def _is_callable(source: str | Path) -> bool:
    return _CALLABLE.fullmatch(str(source)) is not None and not Path(source).exists()


KIND: Final = SourceKind("module:callable of a dataset", _is_callable, lambda source, _: DatasetSource(str(source)))
