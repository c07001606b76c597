"""open_or_build: a cache that is built while its first epoch is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpucache.adopt.builder import open_growing
from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.reading.record_reader import InMemory
from tpucache.recipe import Recipe
from tpucache.store.files import is_url
from tpucache.store.format import MANIFEST_NAME
from tpucache.warmup.build_options import BuildOptions, options_by_name

if TYPE_CHECKING:
    from tpucache.warmup.sources.source import Items, Source


@dataclass(frozen=True, kw_only=True)
class GrowingOptions(BuildOptions):
    """The options of a build, and `in_memory` as CachedDataset takes it."""

    in_memory: InMemory = "auto"


@options_by_name(GrowingOptions)
def open_or_build(
    source: str | Path | Source | Items, cache: str | Path, recipe: Recipe | None = None, *, options: GrowingOptions
) -> CachedDataset:
    """Open the cache of a source, and build what is missing while it is read.

    It returns once the source is listed. Another process builds, with `jobs` workers (default: all cores), in the order
    in which loaders read; whoever asks for a record that is not made yet waits for it. Batches are those of the
    finished cache, and in the end the folder is what `build_cache` writes, whose arguments the others are. What is made
    when this process ends is kept, and the next call continues. Several processes may open the same cache: one of them
    builds, and another one takes over if it ends.

    What is known at the end alone waits for the end: the statistics by which images are normalised, the digest in a
    loader's state, and columns of the samples table that only decoding gives. All of the cache is built before this
    returns where the number of samples or their labels are known at the end alone, which are `on_error="skip"` and
    labels that are in the samples, and where a finished cache is added to.

    Raises what `build_cache` raises, here or from the loader that waits.
    """
    if is_url(cache):
        raise UsageError(f"{cache} is a URL: a cache that is read while it is built is in a folder of this machine")
    directory = Path(cache).absolute()
    others: dict[str, Any] = {"recipe": recipe, **vars(options)}
    in_memory = others.pop("in_memory")
    if (directory / MANIFEST_NAME).exists():
        from tpucache.warmup.build import build_cache

        build_cache(source, directory, **others)
        return CachedDataset(directory, in_memory=in_memory)
    return CachedDataset(open_growing(source, directory, others), in_memory=in_memory)
