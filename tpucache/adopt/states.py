"""States of pictures and labels: digests that show whether a cache is up to date. This file never imports torch.

ImageFolder and from_hf see a change of a file by its size and times; `cached` must read pictures to see a change.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.native import file_system
from tpucache.progress import Progress
from tpucache.store.ahead import map_ahead
from tpucache.store.fields import IMAGE
from tpucache.store.files import OpenFolder
from tpucache.store.remote.local import LOCAL_FILE_SYSTEMS
from tpucache.warmup.run.executors import Executor, Task, to_pickle
from tpucache.warmup.sources.datasets import DatasetSource, class_names, is_stream, labelled_item
from tpucache.warmup.sources.folder import walk
from tpucache.warmup.sources.source import Item, Items, Listing, Sample, name_some
from tpucache.warmup.sources.tree import FolderSource

#: The suffixes of pictures in torchvision: `torchvision.datasets.folder.IMG_EXTENSIONS`.
EXTENSIONS: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
#: The column of the samples table that has the SHA-256 of each picture and label before resizing.
CONTENT: Final = "content"
_COMPARED: Final = 32  # that many items are compared, and the last one
_SAMPLES_PER_TASK: Final = 64

#: If a file is written twice within one tick of its file system's clock, both writes give it the same time. Linux's own
#: file systems tick at least every 10 ms. Others tick every second or two: then all times are whole seconds.
_TICK_NS: Final = 20_000_000
_LONG_TICK_NS: Final = 2_000_000_000
_SECOND_NS: Final = 1_000_000_000
_MOST_LISTINGS: Final = 5

#: The paths and the status of files.
Statuses = Sequence[tuple[str, os.stat_result]]


def at_rest(look: Callable[[], Statuses]) -> Statuses:
    """Return what `look` sees of files, so late that any later change gives a file a new time.

    If a file was written just now, this waits up to 20 ms, or up to two seconds if the file system's clock counts whole
    seconds, and looks again.
    """
    for _ in range(_MOST_LISTINGS):
        asked, found = time.time_ns(), look()
        changed = [status.st_ctime_ns for _, status in found]
        tick = _TICK_NS if any(each % _SECOND_NS for each in changed) else _LONG_TICK_NS
        left = max(changed, default=0) + tick - asked
        if not 0 < left <= _LONG_TICK_NS:  # never wait long: the clock of a file server may be ahead of this machine's
            break
        time.sleep(left / 1e9)
    return found


def compared(count: int) -> Sequence[int]:
    """Return the numbers of up to 33 evenly spread items."""
    return sorted({*(number * count // _COMPARED for number in range(_COMPARED)), count - 1})


def state_of(*facts: object) -> str:
    """Return a digest of 32 hexadecimal digits of facts, whose `repr` differs whenever they differ."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _facts(path: str, status: os.stat_result) -> tuple[str, int, int, int]:
    return path, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class PictureFolder(NamedTuple):
    """The pictures of a folder, in torchvision's order, and a digest that changes whenever a picture does."""

    listing: Listing
    state: str


def list_pictures(root: str, *, allow_empty: bool = False) -> PictureFolder:
    """Return the pictures of a folder, at rest, in the order of torchvision's ImageFolder.

    Each folder in the root is a class; classes are numbered in the order of their names. The pictures of a class are
    all files in its folder, at any depth, with a suffix in `EXTENSIONS`. Links are followed, except a link to a folder
    above. No file is opened. With `allow_empty`, a folder without pictures is a class, too.
    """
    found = at_rest(lambda: list(walk(root)))
    # Other file systems may number inodes anew with each mount.
    keeps_inodes = file_system(OpenFolder(Path(root)).number) in LOCAL_FILE_SYSTEMS
    classes = tuple(sorted(path[:-1] for path, _ in found if path.endswith("/") and path.count("/") == 1))
    if not classes:
        raise SourceError(f"{root} has no folders: put the pictures of each class into a folder of its name")
    # torchvision sorts by the folder's path as text, so that `a-b` comes before `a/b`, and then by the file's name.
    pictures = sorted(
        (each for each in found if "/" in each[0] and each[0].lower().endswith(EXTENSIONS)),
        key=lambda each: (each[0].partition("/")[0], *each[0].rpartition("/")[::2]),
    )
    numbers = {name: number for number, name in enumerate(classes)}
    samples = [
        Sample(number, path, numbers[path.partition("/")[0]], status.st_size)
        for number, (path, status) in enumerate(pictures)
    ]
    empty = sorted({*classes} - {classes[sample.label] for sample in samples})
    if empty and not allow_empty:
        raise SourceError(
            f"{root} has folders without a picture: {name_some(empty)}. Pictures are {' '.join(EXTENSIONS)}; remove "
            "the folders, or give allow_empty=True to keep them as classes without samples"
        )
    facts = [(*_facts(*each), each[1].st_ino if keeps_inodes else 0) for each in pictures]
    return PictureFolder(Listing(samples, classes), state_of(classes, facts))


class PictureFolderSource(FolderSource):
    """A source for warmup: the pictures of a folder in torchvision's order, each labelled with its class number."""

    def __init__(self, root: str, listing: Listing) -> None:
        super().__init__(root)
        self._listing: Any = listing

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_listing": None}  # workers only load, and the listing is large

    def list(self) -> Listing:
        return self._listing  # type: ignore[no-any-return]  # a Listing, unless a worker has this source


def hugging_face_state(dataset: Any, source: DatasetSource) -> str:
    """Return a digest of up to 33 samples, and of the sizes and times of all picture files that the data set names."""
    contents = []
    for number in compared(len(dataset)):
        try:
            item = source.load(Sample(number, str(number)))
        except SampleError as error:
            contents.append(error.reason)
            continue
        if [*item.fields] != [IMAGE]:
            raise UsageError(
                f"the data set's samples have {', '.join(item.fields)}, not only a picture: build a cache by "
                "build_cache, and read it as a CachedDataset"
            )
        contents.append(item.sha256(item.label))
    files = [_facts(*each) for each in at_rest(lambda: _files(dataset))]
    return state_of(len(dataset), str(dataset.features), contents, files)


def _files(dataset: Any) -> Statuses:
    names = [name for name, feature in dataset.features.items() if type(feature).__name__ == "Image"]
    chunks = [chunk for name in names for chunk in dataset.data.column(name).chunks if chunk.field("bytes").null_count]
    paths = {
        path
        for chunk in chunks
        for path, data in zip(chunk.field("path").to_pylist(), chunk.field("bytes").is_valid().to_pylist(), strict=True)
        if path and not data
    }
    try:
        return list(zip(sorted(paths), map_ahead(os.stat, sorted(paths)), strict=True))
    except OSError as error:
        raise SourceError(
            f"{error.filename}, a picture of the data set: {error.strerror}. Put the file there again"
        ) from error


class MapStyleSource:
    """A source for warmup: the items of a map-style data set, each with the SHA-256 of its picture and label.

    When it is pickled for workers, the data set is pickled once, into a temporary file, which is removed with the
    source.
    """

    def __init__(self, dataset: Items) -> None:
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
        self._contents: dict[int, str] = {}  # the digest of each item that was read

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"the {self.name}"

    def __getstate__(self) -> dict[str, Any]:
        self._file = self._file or _pickled(self)
        return {**self.__dict__, "_dataset": None, "_contents": {}}

    def list(self) -> Listing:
        return Listing([Sample(number, str(number)) for number in range(self._length)], self._classes)

    def load(self, sample: Sample) -> Item:
        dataset = _unpickled(self._file) if self._dataset is None else self._dataset
        try:
            value = dataset[int(sample.path)]
        except Exception as error:  # a user's data set raises anything
            raise SampleError(sample.path, f"{self!r} raised {type(error).__name__}: {error}") from error
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise SampleError(sample.path, f"is a {type(value).__name__}, not a picture and its label")
        item = labelled_item(tuple(value), sample.path)
        if [*item.fields] != [IMAGE] or item.columns:
            names = ", ".join([*item.fields, *item.columns])
            raise SampleError(sample.path, f"has {names} instead of only a picture: build a cache by build_cache")
        return Item(item.fields, item.label, {CONTENT: item.sha256(item.label)})

    def state(self, numbers: Sequence[int], jobs: int | None) -> str:
        """Read the items with these numbers; return a digest of them, the data set's length and its class names.

        `jobs` processes read the items, by default one for each core. Raises UsageError for an item that differs from
        what an earlier call has read.
        """
        tasks: list[Task] = [
            (_contents, (self, numbers[at : at + _SAMPLES_PER_TASK]))
            for at in range(0, len(numbers), _SAMPLES_PER_TASK)
        ]
        with Progress(len(numbers), "compare", "samples", is_brief=True) as progress:
            for found in Executor(jobs=jobs).run(iter(tasks), few=True):
                self.check(found)
                progress.advance(len(found))
        contents = [self._contents[number] for number in numbers]
        return state_of(self._length, self._classes, contents)

    def check(self, contents: Mapping[int, str]) -> None:
        """Raise UsageError if an item has not the digest with which it was read before."""
        for number, content in contents.items():
            if self._contents.setdefault(number, content) != content:
                raise UsageError(
                    f"item {number} of {self!r} differs each time it is read, and a cache would keep one of these "
                    "pictures for ever: leave random changes out of the data set, and pass them as transform="
                )


def _contents(source: MapStyleSource, numbers: Sequence[int]) -> dict[int, str]:
    """Return the SHA-256 of each item's picture and label by number; if the item cannot be used, the reason."""
    found = {}
    for number in numbers:
        try:
            found[number] = str(source.load(Sample(number, str(number))).columns[CONTENT])
        except SampleError as error:
            found[number] = error.reason
    return found


def _pickled(source: MapStyleSource) -> str:
    """Pickle a source's data set into a temporary file that only this user can read, and return the file's path.

    The file is removed when the source is garbage collected.
    """
    number, path = tempfile.mkstemp(prefix="tpucache-")
    weakref.finalize(source, _unlink, path, os.getpid())
    try:
        with os.fdopen(number, "wb") as file:
            file.write(to_pickle(source._dataset))
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
