"""from_hf: reads a data set of Hugging Face's `datasets` from a cache, and builds the cache on first use."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpucache.adopt.builder import LEAST_GROWING
from tpucache.adopt.hugging_face_state import check_unchanged, find_state
from tpucache.adopt.kept import BuildChoices, Kept
from tpucache.adopt.pictures import PictureDataset, Size, Transform, to_recipe
from tpucache.errors import SourceError, UsageError
from tpucache.recipe import Recipe, fingerprint
from tpucache.warmup.sources.datasets import DatasetSource, is_saved, is_stream, load_saved

if TYPE_CHECKING:
    from tpucache.warmup.build_options import OnError


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
    """Return the pictures and labels of a `datasets.Dataset`, read from a cache. Build the cache if there is none.

    `dataset` may also be a folder that `save_to_disk` wrote. The picture is in the column `image`, or, without such a
    column, in the only column of pictures. The label is in the column `label`, or in the only column of classes.

    A new cache is built when the data set's own fingerprint has changed, as it does after each `map`, `filter` or
    `select`. It is also built when one of up to 33 compared samples has changed, and, if the data set stores paths
    instead of pictures, when the size or a time of a picture file has changed.

    The other arguments are those of ImageFolder. Raises the errors of ImageFolder, UsageError also for a stream, for
    several splits and for a data set that has a format or transform, and DependencyError without `datasets`.
    """
    choices = BuildChoices(to_recipe(size, recipe, transform), jobs, on_error)
    if isinstance(dataset, (str, Path)):
        if not is_saved(dataset):
            raise SourceError(
                f"{dataset} is not a folder that save_to_disk wrote: give such a folder, or the data set that "
                "datasets.load_dataset returns"
            )
        dataset = load_saved(dataset)
    _check(dataset)
    try:
        source = DatasetSource(dataset)
    except UsageError as error:  # the data set is in memory
        raise UsageError(f"{error}; or call dataset.save_to_disk(FOLDER), and from_hf(FOLDER)") from error
    name = f"{dataset.info.dataset_name or 'dataset'}-{dataset.split or 'all'}"
    kept = Kept(name, ["from_hf", dataset._fingerprint, fingerprint(choices.recipe.to_dict())], cache)
    state = find_state(dataset, source)
    found = kept.open(state, choices.on_error)
    if found is None:
        state = find_state(dataset, source, at_rest=True)

        check = functools.partial(check_unchanged, dataset, source, state, name)
        if choices.on_error == "fail" and len(dataset) >= LEAST_GROWING:
            found = kept.grow(state, source, choices, check)
        else:
            found = kept.build(state, source, choices, check)
    return PictureDataset(found, transform, target_transform)


def _check(dataset: Any) -> None:
    if isinstance(dataset, dict):
        raise UsageError(
            f"the data set has the splits {', '.join(map(str, dataset))}: give one of them, dataset[SPLIT]"
        )
    if is_stream(dataset):
        raise UsageError("a stream has no items by number: load the data set without streaming, or use build_cache")
    if not (hasattr(dataset, "_fingerprint") and hasattr(dataset, "features")):
        raise UsageError(f"a {type(dataset).__name__} is not a datasets.Dataset: use tpucache.cached")
    if dataset.format["type"] is not None:
        raise UsageError(
            f"the data set has the format or transform {dataset.format['type']!r}: give dataset.with_format(None), and "
            "move a transform to the argument transform="
        )
    if not len(dataset):
        raise UsageError("the data set has no samples")
