"""from_hf: a data set of Hugging Face's `datasets`, read out of a cache that the first use builds."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache.adopt.kept import BuildChoices, Kept
from tpucache.adopt.picture_folder import wait_a_tick
from tpucache.adopt.pictures import PictureDataset, Size, Transform, to_recipe
from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.recipe import Recipe, fingerprint
from tpucache.store.fields import IMAGE
from tpucache.warmup.sources.datasets import DatasetSource, is_saved, is_stream, load_saved
from tpucache.warmup.sources.source import Sample

if TYPE_CHECKING:
    from tpucache.warmup.build_options import OnError

_COMPARED: Final = 32


def from_hf(
    dataset: Any,
    size: Size = 224,
    *,
    transform: Transform | None = None,
    target_transform: Transform | None = None,
    cache: str | Path | None = None,
    recipe: Recipe | None = None,
    on_error: OnError = "fail",
    jobs: int | None = None,
) -> PictureDataset:
    """Return the pictures and labels of a `datasets.Dataset`, or of a folder that its `save_to_disk` wrote, out of a
    cache; build that if there is none.

    The picture is the column `image`, or the only one of pictures; the label is `label`, or the only column of classes.
    The cache belongs to the data set's own fingerprint, which changes with each `map`, `filter` or `select`; a few
    samples are compared besides, and where pictures are paths, the sizes and times of their files.

    The other arguments are as in ImageFolder. Raises UsageError also for a stream, for several splits and for a data
    set with a format or transform of its own, DependencyError without `datasets`; and what ImageFolder raises.
    """
    choices = BuildChoices(to_recipe(size, recipe, transform), jobs, on_error)
    if isinstance(dataset, (str, Path)):
        if not is_saved(dataset):
            raise SourceError(
                f"{dataset} is no folder that save_to_disk wrote: load the data set by datasets.load_dataset, and give "
                "that"
            )
        dataset = load_saved(dataset)
    _check(dataset)
    try:
        source = DatasetSource(dataset)
    except UsageError as error:  # it is in memory
        raise UsageError(f"{error}; or call dataset.save_to_disk(FOLDER), and from_hf(FOLDER)") from error
    name = f"{dataset.info.dataset_name or 'dataset'}-{dataset.split or 'all'}"
    kept = Kept(name, ["from_hf", dataset._fingerprint, fingerprint(choices.recipe.to_dict())], cache)
    state = _state(dataset, source)
    found = kept.open(state, choices.on_error)
    if found is None:
        state = _state(dataset, source, at_rest=True)

        def check() -> None:
            if _state(dataset, source) != state:
                raise SourceError(f"files of {name} were changed while its cache was made: run this again")

        found = kept.build(state, source, choices, check)
    return PictureDataset(found, transform, target_transform)


def _check(dataset: Any) -> None:
    """Raise UsageError for what has no fingerprint, no items by number, or other items than it stores."""
    if isinstance(dataset, dict):
        raise UsageError(
            f"the data set has the splits {', '.join(map(str, dataset))}: give one of them, dataset[SPLIT]"
        )
    if is_stream(dataset):
        raise UsageError("a stream has no items by number: load the data set without streaming, or use build_cache")
    if not (hasattr(dataset, "_fingerprint") and hasattr(dataset, "features")):
        raise UsageError(f"a {type(dataset).__name__} is no datasets.Dataset: use tpucache.cached")
    if dataset.format["type"] is not None:
        raise UsageError(
            f"the data set has the format or transform {dataset.format['type']!r}: give dataset.with_format(None), and "
            "what is to be done to each picture as transform="
        )
    if not len(dataset):
        raise UsageError("the data set has no samples")


def _state(dataset: Any, source: DatasetSource, *, at_rest: bool = False) -> str:
    """Return a digest of a few samples, and of the sizes and times of all files that hold pictures.

    Raises UsageError where a sample has more than a picture, SourceError where a file is missing.
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
                f"its samples have {', '.join(item.fields)}, not a picture alone: build a cache by build_cache, and "
                "read it as a CachedDataset"
            )
        digest.update(item.sha256(item.label).encode())
    asked, found = time.time_ns(), _files(dataset)
    while at_rest and wait_a_tick([changed for *_, changed in found], asked):
        asked, found = time.time_ns(), _files(dataset)
    digest.update(repr(found).encode())
    return digest.hexdigest()[:32]


def _files(dataset: Any) -> list[tuple[str, int, int, int]]:
    """Return path, size and times, in ns, of the files of pictures that a data set names instead of holding them."""
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
        found = [(path, os.stat(path)) for path in sorted(paths)]
    except OSError as error:
        raise SourceError(f"{error.filename}, a picture of the data set: {error.strerror}") from error
    return [(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for path, status in found]
