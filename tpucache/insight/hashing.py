"""Perceptual hashes of clean images: copies of a picture have hashes that differ in few bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.loading.find import open_cache
from tpucache.machine import count_cores
from tpucache.native import Array
from tpucache.store.cache import Cache, read_luma
from tpucache.store.fields import IMAGE
from tpucache.store.hashes import BITS, Hashes, Positions, Words, keep_hashes, kept_hashes

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

    #: A dataset, an opened cache, or the folder or URL of a cache.
    Samples: TypeAlias = CachedDataset | Cache | str | Path

_GRID: Final = 32  # an image is averaged to this many rows and columns
_SIDE: Final = 16  # each of the lowest 16 x 16 frequencies of these averages gives a bit

# Everything is computed in integers below 2^53, which float64 holds exactly, so that all machines get the same bits.
_GRID_STEPS: Final = (1 << 14) - 1
_COSINE_STEPS: Final = 1 << 12
_LUMA: Final = (77, 150, 29)  # of 256: ITU-R BT.601

_FINE: Final = 256  # averages are rounded to this fraction of a level

_BLANK_STD: Final = 2.0  # an image of values 0 to 255 with a smaller standard deviation is blank
_USUAL_STD: Final = 64.0  # the standard deviation of photographs whose values are 0 to 255
_BATCH_BYTES: Final = 4 << 20


def opened(dataset: Samples) -> tuple[Cache, Positions | None]:
    """Return the cache of a dataset, and its samples' positions there; None for all samples in the cache's order."""
    if isinstance(dataset, (str, Path)):
        return open_cache(dataset), None
    if isinstance(dataset, Cache):
        return dataset, None
    cache, positions = dataset.cache, dataset.positions
    is_whole = len(positions) == cache.manifest.samples and np.array_equal(positions, np.arange(len(positions)))
    return cache, None if is_whole else positions


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
    16x16 frequencies is above their median. Decoder and codec change a few bits. Images may have any number of channels
    and any depth.

    Raises UsageError for records without images, and DamageError or FormatError for damaged records.
    """
    cache, positions = opened(dataset)
    kept = kept_hashes(cache)
    if kept is not None:
        return kept if positions is None else kept.select(positions)
    wanted = np.arange(cache.manifest.samples) if positions is None else positions
    found = _compute(cache, wanted, threads or count_cores().usable, on_progress)
    if keep and positions is None:
        keep_hashes(cache, found)
    return found


def _compute(cache: Cache, positions: Positions, threads: int, on_progress: Callable[[int, int], None]) -> Hashes:
    manifest = cache.manifest
    image = manifest.fields[0]
    if image.name != IMAGE:
        raise UsageError(
            f"{cache.place} has no images to hash, only the fields {', '.join(each.name for each in manifest.fields)}: "
            "give a cache of images"
        )
    rows = cache.rows(manifest.variants[0], positions)
    # The range of images of more than 8 bits is only known from the cache's statistics.
    unit = float(np.mean(manifest.statistics.std or (0.0,))) / _USUAL_STD if image.is_deep else 1.0
    step = max(1, _BATCH_BYTES // max(1, image.nbytes))
    windows = (rows[at : at + step] for at in range(0, len(rows), step))
    shape = len(rows), BITS // 64
    words, mirrored = np.empty(shape, np.uint64), np.empty(shape, np.uint64)
    found = Hashes(cache.samples.numbers[positions], words, mirrored, np.empty(len(rows), np.bool_))

    def work(start: int) -> int:
        some = rows[start : start + step]
        grids = _read_grids(cache, some)
        part = slice(start, start + len(some))
        found.words[part], found.mirrored[part] = phash(grids)
        found.is_blank[part] = grids.std((1, 2)) < _BLANK_STD * unit
        return len(some)

    if (arriving := cache.reader.arriving) is not None:
        arriving.expect(work, manifest.variants[:1], lambda: windows)
    done = 0
    with ThreadPoolExecutor(threads, "tpucache-hash") as pool:
        try:
            for count in pool.map(work, range(0, len(rows), step)):
                done += count
                on_progress(done, len(rows))
        finally:
            pool.shutdown(cancel_futures=True)  # a Ctrl-C waits only for batches that were begun
    return found


def _read_grids(cache: Cache, rows: Positions) -> npt.NDArray[np.float64]:
    return grey_grids(read_luma(cache, rows, IMAGE, least=2 * _GRID))


def details(cache: Cache, positions: Positions) -> npt.NDArray[np.float64]:
    """Return the fine structure of the clean images at `positions`, float64 (n, 32, 32), each with a norm of 1 or 0.

    It consists of an image's grey averages, each minus the mean of itself and its eight neighbours. Hashes lack it,
    because they have only the lowest frequencies.
    """
    grids = _read_grids(cache, cache.rows(cache.manifest.variants[0], positions))
    padded = np.pad(grids, ((0, 0), (1, 1), (1, 1)), mode="edge")
    rows = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    fine = grids - (rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]) / 9
    fine -= fine.mean((1, 2), keepdims=True)
    length = np.sqrt((fine**2).sum((1, 2), keepdims=True))
    found: npt.NDArray[np.float64] = fine / np.where(length > 0, length, 1.0)
    return found


def grey_grids(images: Array) -> npt.NDArray[np.float64]:
    """Return images (n, height, width, channels) averaged to 32x32 grey values in their scale, float64 (n, 32, 32).

    Three channels of 8 bits are red, green and blue, and grey is their luma. Other channels are averaged.
    """
    levels, unit, low = images, np.ones(1), np.zeros(1)
    if images.dtype not in (np.uint8, np.uint16):
        levels, unit, low = _to_levels(images)
    count, height, width, channels = levels.shape
    weights = _LUMA if images.dtype == np.uint8 and channels == len(_LUMA) else (1,) * channels
    rows = _averages(levels.reshape(count, height, width * channels)).reshape(count, _GRID, width, channels)
    grey = rows @ np.array(weights, np.float64)
    grids = _averages(grey.swapaxes(1, 2)).swapaxes(1, 2)
    scale = unit / (sum(weights) * _FINE * _FINE)
    scaled: npt.NDArray[np.float64] = grids * scale[:, None, None] + low[:, None, None]
    return scaled


def phash(grids: npt.NDArray[np.float64]) -> tuple[Words, Words]:
    """Return the hashes of grey grids (n, 32, 32), and those of their mirror images: uint64 (n, 4) each."""
    low = grids.min((1, 2), keepdims=True)
    contrast = np.maximum(grids.max((1, 2), keepdims=True) - low, np.finfo(np.float64).tiny)
    steps = np.rint((grids - low) / contrast * _GRID_STEPS)
    cosines, count = _cosines(), len(steps)
    across = (steps.reshape(-1, _GRID) @ cosines.T).reshape(count, _GRID, _SIDE).swapaxes(1, 2)
    found = (across.reshape(-1, _GRID) @ cosines.T).reshape(count, BITS)  # [horizontal, vertical] frequencies
    turned = found.reshape(count, _SIDE, _SIDE) * np.where(np.arange(_SIDE) % 2, -1.0, 1.0)[:, None]
    return _above_median(found), _above_median(turned.reshape(count, BITS))


def _averages(values: Array) -> npt.NDArray[np.float64]:
    """Return the means of `values` (n, length, m) over 32 equal parts of the length, times 256 and rounded.

    A value that lies in two parts counts for both, each with its share. To be fast, neighbours are first summed in
    runs.
    """
    count, length, width = values.shape
    run = length // _GRID if length % _GRID == 0 else max(1, length // (4 * _GRID))
    whole = length // run * run
    inner = values[:, :whole].reshape(count, -1, run, width)
    if values.dtype.kind == "f":
        sums = inner.sum(2)
    else:  # 16 bits hold the sum of up to 257 values of 8 bits
        sums = inner.sum(2, dtype=np.uint16 if values.dtype == np.uint8 and run <= 257 else np.uint32)
    if sums.shape[1] == _GRID:
        return _rounded(sums * (_FINE / run))
    sums = np.concatenate([sums, values[:, whole:]], axis=1, dtype=np.float64)
    ends = np.concatenate([np.arange(run, whole + 1, run), np.arange(whole + 1, length + 1)])
    starts = np.concatenate([[0], ends[:-1]])
    borders = np.arange(_GRID + 1) * length  # between the parts, in 32nds of a value
    places = np.minimum(np.searchsorted(ends * _GRID, borders, "right"), len(ends) - 1)
    shares = (borders - starts[places] * _GRID) * np.where(ends - starts == run, 1, run)[places]
    before = np.cumsum(sums, axis=1) - sums
    totals = before[:, places] * (_GRID * run) + sums[:, places] * shares[:, None].astype(np.float64)
    return _rounded(np.diff(totals, axis=1) * (_FINE / (run * length)))


def _rounded(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.rint(values, out=values)


@functools.cache
def _cosines() -> npt.NDArray[np.float64]:
    angles = np.outer(np.arange(_SIDE), 2 * np.arange(_GRID) + 1) * (np.pi / (2 * _GRID))
    cosines: npt.NDArray[np.float64] = np.rint(np.cos(angles) * _COSINE_STEPS)
    return cosines


def _above_median(found: npt.NDArray[np.float64]) -> Words:
    """Return whether each value is above the median of its row (n, 256), as uint64 (n, 4)."""
    middle = np.partition(found, (BITS // 2 - 1, BITS // 2), axis=1)[:, BITS // 2 - 1 : BITS // 2 + 1]
    packed = np.packbits(2 * found > middle.sum(1, keepdims=True), axis=1)
    words: Words = packed.view("<u8").astype(np.uint64)
    return words


def _to_levels(images: Array) -> tuple[npt.NDArray[np.uint16], Array, Array]:
    """Return images as uint16 from 0, and each image's step and lowest value. Values that are not finite count as 0."""
    values = np.nan_to_num(images.astype(np.float64), posinf=0.0, neginf=0.0)
    low = values.min((1, 2, 3), keepdims=True)
    contrast = values.max((1, 2, 3), keepdims=True) - low
    unit = np.where(contrast > 0, contrast / 0xFFFF, 1.0) if images.dtype.kind == "f" else np.ones_like(contrast)
    return np.rint((values - low) / unit).astype(np.uint16), unit.reshape(-1), low.reshape(-1)
