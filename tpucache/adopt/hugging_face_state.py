"""The state of a Hugging Face data set: a digest that shows whether its cache is up to date. Never imports torch."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any, Final

from tpucache.adopt.picture_folder import wait_a_tick
from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.store.ahead import map_ahead
from tpucache.store.fields import IMAGE
from tpucache.warmup.sources.datasets import DatasetSource
from tpucache.warmup.sources.source import Sample

_COMPARED: Final = 32


def check_unchanged(dataset: Any, source: DatasetSource, state: str, name: str) -> None:
    """Raise SourceError if a data set no longer has the given state, the result of `find_state`.

    `name` is for the message.
    """
    if find_state(dataset, source) != state:
        raise SourceError(f"pictures of {name} were changed while its cache was made: run this again")


def find_state(dataset: Any, source: DatasetSource, *, at_rest: bool = False) -> str:
    """Return a digest of up to 33 samples, and of the sizes and times of all picture files that the data set names.

    With `at_rest`, first wait, so that a file that changes later gets a new time (see `wait_a_tick`). Raises UsageError
    for a sample that is not exactly one picture, SourceError for a missing file.
    """
    count = len(dataset)
    numbers = sorted({*(number * count // _COMPARED for number in range(_COMPARED)), count - 1})
    digest = hashlib.sha256(f"{count} {dataset.features}".encode())
    for number in numbers:
        try:
            item = source.load(Sample(number, str(number)))
        except SampleError as error:
            digest.update(error.reason.encode())
            continue
        if [*item.fields] != [IMAGE]:
            raise UsageError(
                f"the data set's samples have {', '.join(item.fields)}, not only a picture: build a cache by "
                "build_cache, and read it as a CachedDataset"
            )
        digest.update(item.sha256(item.label).encode())
    asked, found = time.time_ns(), _files(dataset)
    while at_rest and wait_a_tick([changed for *_, changed in found], asked):
        asked, found = time.time_ns(), _files(dataset)
    digest.update(repr(found).encode())
    return digest.hexdigest()[:32]


def _files(dataset: Any) -> list[tuple[str, int, int, int]]:
    """Return (path, size in bytes, mtime and ctime in ns) of each picture that the data set stores only as a path.

    Raises SourceError for a file that does not exist or cannot be read.
    """
    names = [name for name, feature in dataset.features.items() if type(feature).__name__ == "Image"]
    paths = {
        path
        for name in names
        for chunk in dataset.data.column(name).chunks
        if chunk.field("bytes").null_count
        for path, data in zip(chunk.field("path").to_pylist(), chunk.field("bytes").is_valid().to_pylist(), strict=True)
        if path and not data
    }
    try:
        found = list(zip(sorted(paths), map_ahead(os.stat, sorted(paths)), strict=True))
    except OSError as error:
        raise SourceError(
            f"{error.filename}, a picture of the data set: {error.strerror}. Put the file there again"
        ) from error
    return [(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for path, status in found]
