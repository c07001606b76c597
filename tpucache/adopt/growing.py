"""open_or_build: a cache that is built while its first epoch is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpucache.adopt.builder import start_building
from tpucache.errors import UsageError
from tpucache.loading.reading.record_reader import InMemory
from tpucache.recipe import Recipe
from tpucache.store.files import is_url
from tpucache.store.format import MANIFEST_NAME
from tpucache.warmup.build_options import BuildOptions, options_by_name

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset
    from tpucache.warmup.sources.source import Items, Source


@dataclass(frozen=True, kw_only=True)
class GrowingOptions(BuildOptions):
    """The options of a build, and the argument `in_memory` of CachedDataset."""

    in_memory: InMemory = "auto"


@options_by_name(GrowingOptions)
def open_or_build(
    source: str | Path | Source | Items, cache: str | Path, recipe: Recipe | None = None, *, options: GrowingOptions
) -> CachedDataset:
    """Open the cache of a source. Records that are missing are built while the cache is read.

    The call returns once the source is listed. Another process builds the cache with `jobs` workers (default: all
    cores), in the order in which loaders read. A reader waits for a record that is not built yet, so batches are the
    same as from a finished cache. In the end the folder has the same files as after `build_cache`. If this process ends
    early, the finished records are kept, and the next call continues. Several processes may open the same cache: one of
    them builds it, and another one continues the build if the first one ends. `in_memory` is that of CachedDataset; all
    other arguments are those of `build_cache`.

    The statistics that normalise images, the digest in a loader's state, and columns that only decoding gives are known
    after the build: reading them waits until the cache is finished. The call itself waits for the whole cache if the
    number of samples or their labels are not known earlier: with `on_error="skip"`, if labels are stored inside the
    samples, and if samples are added to a finished cache.

    Raises the errors of `build_cache`, in this call or in the loader that waits.
    """
    if is_url(cache):
        raise UsageError(
            f"{cache} is a URL: a cache can be read while it is built only in a folder of this machine. Give such a "
            "folder"
        )
    directory = Path(cache).absolute()
    others: dict[str, Any] = {"recipe": recipe, **vars(options)}
    in_memory = others.pop("in_memory")
    if (directory / MANIFEST_NAME).exists():
        from tpucache.warmup.build import build_cache

        build_cache(source, directory, **others)
        started = None
    else:
        started = start_building(source, directory, others)
    # Importing this imports torch, which takes a second or two: the other process builds meanwhile.
    from tpucache.loading.dataset import CachedDataset

    dataset = CachedDataset(directory if started is None else started(), in_memory=in_memory)
    dataset.cache.may_be_growing = True
    return dataset
