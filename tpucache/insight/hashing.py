"""Perceptual hashes of clean images: copies of a picture have hashes that differ in few bits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from tpucache.errors import UsageError
from tpucache.loading.find import open_cache
from tpucache.machine import count_cores
from tpucache.native import Array
from tpucache.store.cache import Cache, read_luma
from tpucache.store.fields import IMAGE
from tpucache.store.hashes import Hashes, Positions, Words, keep_hashes, kept_hashes

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

    #: A dataset, an opened cache, or the folder or URL of a cache.
    Samples: TypeAlias = CachedDataset | Cache | str | Path

Grids = npt.NDArray[np.float64]

_GRID: Final = 32  # an image is averaged to this many rows and columns
_SIDE: Final = 16  # each of the lowest 16 x 16 frequencies of these averages gives a bit

# Everything is computed in integers below 2^53, which float64 holds exactly, so that all machines get the same bits.
_GRID_STEPS: Final = (1 << 14) - 1
_COSINE_STEPS: Final = 1 << 12
_COSINES: Final = np.rint(
    _COSINE_STEPS * np.cos(np.outer(np.arange(_SIDE), 2 * np.arange(_GRID) + 1) * np.pi / (2 * _GRID))
)
_LUMA: Final = (77, 150, 29)  # of 256: ITU-R BT.601
_FINE: Final = 256  # averages are rounded to this fraction of a level

_BLANK_STD: Final = 2.0  # an image of values 0 to 255 with a smaller standard deviation is blank
_USUAL_STD: Final = 64.0  # the standard deviation of photographs whose values are 0 to 255
_BATCH_BYTES: Final = 1 << 20


def opened(dataset: Samples) -> tuple[Cache, Positions]:
    """Return the cache of a dataset, and its samples' positions there."""
    if isinstance(dataset, (str, Path)):
        dataset = open_cache(dataset)
    if isinstance(dataset, Cache):
        return dataset, np.arange(dataset.manifest.samples)
    return dataset.cache, dataset.positions


def hashes(
    dataset: Samples,
    *,
    threads: int | None = None,
    keep: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Hashes:
    """Return a perceptual hash of each clean image of a dataset, an opened cache, or a cache's folder or URL.

    Hashes that the cache's folder has are read. Otherwise `threads` threads (default: one for each core) compute them
    from the records; with `keep`, they are then stored in the folder, if it can be written and all samples were hashed.

    The hash is pHash (Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010) with 256
    bits: the image is averaged to 32x32 grey values and cosine-transformed; each bit says whether one of the lowest
    16x16 frequencies is above their median. Images may have any number of channels and any depth.

    Raises UsageError for records without images, and DamageError or FormatError for damaged records.
    """
    cache, positions = opened(dataset)
    if (kept := kept_hashes(cache)) is not None:
        return kept.select(positions)
    manifest, image = cache.manifest, cache.manifest.fields[0]
    if image.name != IMAGE:
        raise UsageError(
            f"{cache.place} has no images to hash, only the fields {', '.join(each.name for each in manifest.fields)}: "
            "give a cache of images"
        )
    rows = cache.rows(manifest.variants[0], positions)
    step = max(1, _BATCH_BYTES // max(1, image.nbytes))
    batches = [rows[at : at + step] for at in range(0, max(1, len(rows)), step)]
    # The range of images of more than 8 bits is only known from the cache's statistics.
    unit = float(np.mean(manifest.statistics.std or (0.0,))) / _USUAL_STD if image.is_deep else 1.0

    def work(batch: Positions) -> tuple[Words, Words, npt.NDArray[np.bool_]]:
        grids = _read_grids(cache, batch)
        return *phash(grids), grids.std((1, 2)) < _BLANK_STD * unit

    if (arriving := cache.reader.arriving) is not None:
        arriving.expect(work, manifest.variants[:1], lambda: iter(batches))
    parts = []
    with ThreadPoolExecutor(threads or count_cores().usable, "tpucache-hash") as pool:
        for part in pool.map(work, batches):  # when it is left early, by a Ctrl-C, it cancels what has not begun
            parts.append(part)
            on_progress(min(len(parts) * step, len(rows)), len(rows))
    found = Hashes(cache.samples.numbers[positions], *map(np.concatenate, zip(*parts, strict=True)))
    if keep and np.array_equal(positions, np.arange(manifest.samples)):
        keep_hashes(cache, found)
    return found


def _read_grids(cache: Cache, rows: Positions) -> Grids:
    return grey_grids(read_luma(cache, rows, IMAGE, least=2 * _GRID))


def details(cache: Cache, positions: Positions) -> Grids:
    """Return the fine structure of the clean images at `positions`, float64 (n, 32, 32), each with a norm of 1 or 0.

    It consists of an image's grey averages, each minus the mean of itself and its eight neighbours. Hashes lack it,
    because they have only the lowest frequencies.
    """
    grids = _read_grids(cache, cache.rows(cache.manifest.variants[0], positions))
    padded = np.pad(grids, ((0, 0), (1, 1), (1, 1)), mode="edge")
    fine = grids - sliding_window_view(padded, (3, 3), (1, 2)).mean((3, 4))
    fine -= fine.mean((1, 2), keepdims=True)
    length = np.sqrt((fine**2).sum((1, 2), keepdims=True))
    return np.asarray(fine / np.where(length > 0, length, 1.0))


def grey_grids(images: Array) -> Grids:
    """Return images (n, height, width, channels) averaged to 32x32 grey values, float64 (n, 32, 32).

    Three channels of 8 bits are red, green and blue, and grey is their luma. Other channels are averaged. Floats are
    counted from the lowest one in 65,535 steps an image; those that are not finite count as 0.
    """
    unit = np.ones((len(images), 1, 1))
    if images.dtype.kind == "f":
        values = np.nan_to_num(images.astype(np.float64), posinf=0.0, neginf=0.0)
        values -= values.min((1, 2, 3), keepdims=True)
        unit = values.max((1, 2, 3))[:, None, None] / 0xFFFF
        unit[unit == 0] = 1.0
        images = np.rint(values / unit[..., None])
    count, height, width, channels = images.shape
    weights = _LUMA if images.dtype == np.uint8 and channels == len(_LUMA) else (1,) * channels
    rows = _averages(images.reshape(count, height, -1)).reshape(count, _GRID, width, channels)
    grids = _averages((rows @ np.array(weights, np.float64)).swapaxes(1, 2)).swapaxes(1, 2)
    return np.asarray(grids * (unit / (sum(weights) * _FINE * _FINE)))


def _averages(values: Array) -> Grids:
    """Return the means of `values` (n, length, m) over 32 equal parts of the length, times 256 and rounded.

    A value that lies in two parts counts for both, each with its share.
    """
    if values.shape[1] < _GRID:
        values = np.repeat(values, _GRID, axis=1)
    length = values.shape[1]
    borders, shares = np.divmod(np.arange(_GRID + 1) * length, _GRID)  # shares are in 32nds of a value
    means = np.diff(values[:, np.minimum(borders, length - 1)] * shares[:, None].astype(np.float64), axis=1)
    for part, (start, end) in enumerate(pairwise(borders.tolist())):
        means[:, part] += _GRID * values[:, start:end].sum(1, np.float64)
    means *= _FINE / length
    return np.asarray(np.rint(means, out=means))


def phash(grids: Grids) -> tuple[Words, Words]:
    """Return the hashes of grey grids (n, 32, 32), and those of their mirror images: uint64 (n, 4) each."""
    contrast = np.maximum(np.ptp(grids, (1, 2), keepdims=True), np.finfo(np.float64).tiny)
    steps = np.rint((grids - grids.min((1, 2), keepdims=True)) / contrast * _GRID_STEPS)
    found = _COSINES @ steps.swapaxes(1, 2) @ _COSINES.T  # [horizontal, vertical] frequencies
    turned = found * np.where(np.arange(_SIDE) % 2, -1.0, 1.0)[:, None]
    return _above_median(found), _above_median(turned)


def _above_median(found: Array) -> Words:
    """Return whether each value is above the median of its image (n, 16, 16), as uint64 (n, 4)."""
    packed = np.packbits((found > np.median(found, (1, 2), keepdims=True)).reshape(len(found), -1), axis=1)
    return np.asarray(packed.view("<u8"), np.uint64)
