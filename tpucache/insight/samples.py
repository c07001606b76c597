"""The samples that are asked about: those of a dataset, or all of a cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from tpucache.loading.find import open_cache
from tpucache.store import facts
from tpucache.store.cache import Cache

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

    #: A dataset, an opened cache, or what `CachedDataset` opens.
    Samples: TypeAlias = CachedDataset | Cache | str | Path

Positions = npt.NDArray[np.int64]


def opened(dataset: Samples) -> tuple[Cache, Positions | None]:
    """Return the cache of a dataset, and the positions of its samples in it; None where these are all, in order."""
    if isinstance(dataset, (str, Path)):
        return open_cache(dataset), None
    if isinstance(dataset, Cache):
        return dataset, None
    cache, positions = dataset.cache, dataset.positions
    is_whole = len(positions) == cache.manifest.samples and np.array_equal(positions, np.arange(len(positions)))
    return cache, None if is_whole else positions


def findings(dataset: Samples) -> facts.Findings:
    """Return what is worth a look in the cache of a dataset, an opened cache, or a cache's folder or URL.

    All samples of the cache count. No record is read. Raises what opening a cache raises.
    """
    cache, _ = opened(dataset)
    return facts.findings(cache)
