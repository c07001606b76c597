"""MapStyleSource: the items of any map-style data set, each with a digest of its content. Never imports torch."""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache.errors import SampleError, UsageError
from tpucache.progress import Progress
from tpucache.store.fields import IMAGE
from tpucache.warmup.run.executors import Executor, Task
from tpucache.warmup.sources.datasets import is_stream, labelled_item
from tpucache.warmup.sources.source import Item, Items, Listing, Sample

if TYPE_CHECKING:
    from tpucache.store.cache import Cache

#: The column of the samples table with the SHA-256 of each picture and label, as the data set gave them.
CONTENT: Final = "content"
_COMPARED: Final = 32  # pictures that are compared where an identity says that all are the same
_READ_TWICE: Final = 8
_A_TASK: Final = 64


class MapStyleSource:
    """The items of a map-style data set, each with the SHA-256 of its content. Workers load the set from a file."""

    loads_in_threads = False

    def __init__(self, dataset: Items) -> None:
        """Take a data set. Raises UsageError for an object that is not one."""
        if is_stream(dataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UsageError(
                f"a {type(dataset).__name__} has no length, or no numbered items: build the cache of a stream by "
                "build_cache, which copies it"
            )
        if hasattr(dataset, "_fingerprint") and hasattr(dataset, "features"):
            raise UsageError("a data set of Hugging Face has a fingerprint of its own: use tpucache.from_hf")
        kind = type(dataset)
        self.name, self.kind = kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
        self._dataset: Items | None = dataset
        self._length = len(dataset)
        if not self._length:
            raise UsageError(f"the {self.name} has no samples")
        self._classes = _classes_of(dataset)
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
        """Return all items as samples, named by their numbers."""
        return Listing([Sample(number, str(number)) for number in range(self._length)], self._classes)

    def load(self, sample: Sample) -> Item:
        """Return an item. Raises SampleError where the data set raises an error, or returns anything but a picture and
        its label.
        """
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
        """Return the SHA-256 of an item in hexadecimal, or the reason why the item cannot be used."""
        try:
            return str(self.load(Sample(number, str(number))).columns[CONTENT])
        except SampleError as error:
            return error.reason

    def few_contents(self) -> tuple[Any, ...]:
        """Return the length of the data set, and the digests of its first item, its last, and some in between.

        Raises UsageError where an item differs when it is read again.
        """
        count = self._length
        numbers = sorted({*(number * count // _COMPARED for number in range(_COMPARED)), count - 1})
        contents = {number: self.content(number) for number in numbers}
        for number in numbers[:: max(1, len(numbers) // _READ_TWICE)]:
            if self.content(number) != contents[number]:
                raise UsageError(
                    f"item {number} of {self!r} differs each time it is read, and a cache would keep one of these "
                    "pictures for ever: leave random changes out of the data set, and pass them as transform="
                )
        return (count, *contents.values())

    def difference(self, cache: Cache, jobs: int | None) -> str | None:
        """Compare all items with those of a cache. Return how they differ, or None where they do not."""
        table, skipped = cache.samples, {each.number for each in cache.manifest.skipped}
        known: dict[int, Any] = dict(zip(table.numbers.tolist(), table.get(CONTENT, ()), strict=False))
        numbers = range(self._length)
        if len(known) + len(skipped) != len(numbers) or any(
            number not in known | dict.fromkeys(skipped) for number in numbers
        ):
            return f"it has other samples, {len(numbers):,} and not {len(known) + len(skipped):,},"
        compared = [(number, str(content)) for number, content in known.items()]
        tasks = [(_differing, (self, compared[at : at + _A_TASK])) for at in range(0, len(compared), _A_TASK)]
        with Progress(len(compared), "compare", "samples") as progress:
            for done, wrong in _results(tasks, jobs):
                if wrong is not None:
                    return f"sample {wrong} is another one"
                progress.advance(done)
        return None


def _results(tasks: Sequence[Task], jobs: int | None) -> Iterator[Any]:
    return Executor(jobs=jobs).run(iter(tasks), few=True)


def _differing(source: MapStyleSource, compared: Sequence[tuple[int, str]]) -> tuple[int, int | None]:
    """Return how many items were compared, and the number of the first one that differs, or None."""
    wrong = next((number for number, content in compared if source.content(number) != content), None)
    return len(compared), wrong


def _classes_of(dataset: Any) -> tuple[str, ...]:
    """Return the class names of a data set in the order of their numbers; none if its classes are not names."""
    names = getattr(dataset, "classes", None)
    is_named = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    return tuple(names) if names is not None and is_named and len({*names}) == len(names) else ()


def _pickled(source: MapStyleSource) -> str:
    """Write a source's data set into a file that only this user can read, and that is removed with the source."""
    import joblib

    number, path = tempfile.mkstemp(prefix="tpucache-")
    weakref.finalize(source, _unlink, path, os.getpid())
    try:
        with os.fdopen(number, "wb") as file:
            # This can pickle lambdas, too, and what a notebook defines.
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
