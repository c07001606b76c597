"""The samples that functions of `insight` take: those of a dataset, or all samples of a cache."""

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

    #: A dataset, an opened cache, or the folder or URL of a cache.
    Samples: TypeAlias = CachedDataset | Cache | str | Path

Positions = npt.NDArray[np.int64]


def opened(dataset: Samples) -> tuple[Cache, Positions | None]:
    """Return the cache of a dataset, and the positions of the dataset's samples in that cache.

    The positions are None if the dataset has all samples of the cache, in the cache's order.
    """
    if isinstance(dataset, (str, Path)):
        return open_cache(dataset), None
    if isinstance(dataset, Cache):
        return dataset, None
    cache, positions = dataset.cache, dataset.positions
    is_whole = len(positions) == cache.manifest.samples and np.array_equal(positions, np.arange(len(positions)))
    return cache, None if is_whole else positions


def findings(dataset: Samples) -> facts.Findings:
    """Return possible problems of a cache. `dataset` is a dataset of the cache, the opened cache, or its folder or URL.

    All samples of the cache are considered, also those that a dataset leaves out. No record is read. Raises the errors
    of opening a cache.
    """
    cache, _ = opened(dataset)
    return facts.findings(cache)
