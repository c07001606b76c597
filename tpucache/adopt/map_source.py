"""MapStyleSource: a source for warmup that returns the items of any map-style data set. This file imports no torch."""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache.errors import SampleError, UsageError
from tpucache.progress import Progress
from tpucache.store.fields import IMAGE
from tpucache.warmup.blocks import content_sha256
from tpucache.warmup.listing import content_digests
from tpucache.warmup.run.executors import Executor, Task
from tpucache.warmup.sources.datasets import class_names, is_stream, labelled_item
from tpucache.warmup.sources.source import Item, Items, Listing, Sample

if TYPE_CHECKING:
    from tpucache.store.cache import Cache

#: The column of the samples table that has the SHA-256 of each picture and label before resizing.
CONTENT: Final = "content"
_COMPARED: Final = 32  # `few_contents` reads this many items, and the last item
_SAMPLES_PER_TASK: Final = 64


class MapStyleSource:
    """A source for warmup: the items of a map-style data set, each with the SHA-256 of its picture and label.

    When the source is pickled for workers, the data set is pickled once, into a temporary file, which workers read.
    """

    loads_in_threads = False

    def __init__(self, dataset: Items) -> None:
        """Read the data set's length and classes. Raises UsageError for a data set that is empty or not map-style."""
        if is_stream(dataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UsageError(
                f"a {type(dataset).__name__} has no length, or no numbered items: build the cache of a stream by "
                "build_cache, which copies the stream's items first"
            )
        if hasattr(dataset, "_fingerprint") and hasattr(dataset, "features"):
            raise UsageError("a data set of Hugging Face has a fingerprint of its own: use tpucache.from_hf")
        kind = type(dataset)
        self.name, self.kind = kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
        self._dataset: Items | None = dataset
        self._length = len(dataset)
        if not self._length:
            raise UsageError(f"the {self.name} has no samples")
        self._classes = class_names(dataset, self.name)
        self._file = ""

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"the {self.name}"

    def __getstate__(self) -> dict[str, Any]:
        if not self._file:
            self._file = _pickled(self)
        return {**self.__dict__, "_dataset": None}

    def list(self) -> Listing:
        """Return all items as samples; the path of a sample is its number."""
        return Listing([Sample(number, str(number)) for number in range(self._length)], self._classes)

    def load(self, sample: Sample) -> Item:
        """Return the item of a sample. Raises SampleError if the data set fails, or returns no picture and label."""
        dataset = _unpickled(self._file) if self._dataset is None else self._dataset
        try:
            value = dataset[int(sample.path)]
        except Exception as error:  # a user's data set raises anything
            raise SampleError(sample.path, f"{self!r} raised {type(error).__name__}: {error}") from error
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            what = (
                f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
            )
            raise SampleError(sample.path, f"is a {what}, not a tuple of a picture and its label")
        item = labelled_item(tuple(value), sample.path)
        if [*item.fields] != [IMAGE] or item.columns:
            names = ", ".join([*item.fields, *item.columns])
            raise SampleError(sample.path, f"has {names} instead of only a picture: build a cache by build_cache")
        return Item(item.fields, item.label, {CONTENT: item.sha256(item.label)})

    def content(self, number: int) -> str:
        """Return the SHA-256 of an item's picture and label in hexadecimal; the reason if the item cannot be used."""
        try:
            return str(self.load(Sample(number, str(number))).columns[CONTENT])
        except SampleError as error:
            return error.reason

    def few_contents(self) -> tuple[Any, ...]:
        """Return the length of the data set, its class names, and the digests (`content`) of up to 33 items.

        The items are evenly spread, and each is read twice. Raises UsageError if an item differs the second time.
        """
        count = self._length
        numbers = sorted({*(number * count // _COMPARED for number in range(_COMPARED)), count - 1})
        contents = {number: self.content(number) for number in numbers}
        for number in numbers:
            if self.content(number) != contents[number]:
                raise UsageError(_random_text(self, number))
        return (count, self._classes, *contents.values())

    def difference(self, cache: Cache, jobs: int | None) -> str | None:
        """Compare all items with a cache. Returns a text about the first difference, or None without a difference.

        `jobs` processes read the items, by default one for each core. Raises UsageError for an item that differs each
        time it is read.
        """
        table, skipped = cache.samples, {each.number for each in cache.manifest.skipped}
        known: dict[int, Any] = dict(zip(table.numbers.tolist(), table.get(CONTENT, ()), strict=False))
        numbers = range(self._length)
        if len(known) + len(skipped) != len(numbers) or {*known, *skipped} != {*numbers}:
            return f"it has other samples than its cache: {len(numbers):,}, not {len(known) + len(skipped):,}"
        digests = content_digests(cache.manifest)
        for number in sorted(skipped):  # none of them is used, but one may have become usable
            if content_sha256(self, Sample(number, str(number))) != digests.get(number, ""):
                return f"sample {number}, which could not be used, has changed since"
        compared = [(number, str(content)) for number, content in known.items()]
        tasks: list[Task] = [
            (_differing, (self, compared[at : at + _SAMPLES_PER_TASK]))
            for at in range(0, len(compared), _SAMPLES_PER_TASK)
        ]
        with Progress(len(compared), "compare", "samples") as progress:
            for done, wrong in Executor(jobs=jobs).run(iter(tasks), few=True):
                if wrong is not None:
                    if self.content(wrong) != self.content(wrong):
                        raise UsageError(_random_text(self, wrong))
                    return f"sample {wrong} has another picture or label than in its cache"
                progress.advance(done)
        return None


def _differing(source: MapStyleSource, compared: Sequence[tuple[int, str]]) -> tuple[int, int | None]:
    """Return how many items were compared, and the number of the first item that differs from the cache, or None.

    `compared` has pairs of an item's number and its digest in the cache.
    """
    wrong = next((number for number, content in compared if source.content(number) != content), None)
    return len(compared), wrong


def _random_text(source: MapStyleSource, number: int) -> str:
    return (
        f"item {number} of {source!r} differs each time it is read, and a cache would keep one of these pictures for "
        "ever: leave random changes out of the data set, and pass them as transform="
    )


def _pickled(source: MapStyleSource) -> str:
    """Pickle a source's data set into a temporary file that only this user can read, and return the file's path.

    The file is removed when the source is garbage collected.
    """
    import joblib

    number, path = tempfile.mkstemp(prefix="tpucache-")
    weakref.finalize(source, _unlink, path, os.getpid())
    try:
        with os.fdopen(number, "wb") as file:
            # joblib's wrapper also pickles lambdas, and functions and classes that a notebook defines.
            pickle.dump(joblib.wrap_non_picklable_objects(source._dataset, keep_wrapper=False), file)
    except Exception as error:  # a user's data set raises anything
        raise pickle.PicklingError(f"{source!r} cannot be pickled ({type(error).__name__}: {error})") from error
    return path


def _unlink(path: str, process: int) -> None:
    if os.getpid() == process:
        Path(path).unlink(missing_ok=True)


@functools.lru_cache(maxsize=1)
def _unpickled(path: str) -> Any:
    with Path(path).open("rb") as file:
        return pickle.load(file)  # noqa: S301  # this user's own process has just written the file
