"""Counts for charts: of the values of each channel, and of the files' sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.report.records import Records

_RECORDS: Final = 256
_BYTES: Final = 64 << 20
_BINS: Final = 28
_VALUES: Final = 256


@dataclass(frozen=True)
class Channels:
    """How often values occur in each channel, int64 (channels, 256), in `records` records of variant 0.

    The 256 steps are equal and go from `least` to `most`.
    """

    counts: npt.NDArray[np.int64]
    records: int
    least: float
    most: float


@dataclass(frozen=True)
class Sizes:
    """How many files lie in each of some steps of equal ratio from the smallest to the largest, in bytes.

    `middle` is the size in the middle of that scale, `median` that of the middle file, `total` that of all.
    """

    counts: npt.NDArray[np.int64]
    smallest: int
    middle: int
    largest: int
    median: int
    total: int


def channel_histogram(records: Records, seed: int = 0) -> Channels | None:
    """Count the values in at most 256 clean records, or 64 MiB of them, at random; None where there is no image."""
    image = records.image
    if image is None or not len(records.positions):
        return None
    most = max(1, min(_RECORDS, _BYTES // max(1, records.manifest.layout.nbytes)))
    chosen = np.unique(records.positions)
    if len(chosen) > most:
        chosen = np.sort(np.random.default_rng(seed).choice(chosen, most, replace=False))
    clean = [records.read(position, records.manifest.variants[0])[image.name] for position in chosen.tolist()]
    is_byte = image.dtype == "|u1"
    lowest = 0.0 if is_byte else float(min(pixels.min() for pixels in clean))
    highest = 255.0 if is_byte else float(max(pixels.max() for pixels in clean))
    counts = np.zeros((image.shape[2], _VALUES), np.int64)
    for pixels in clean:
        places = pixels if is_byte else _places(pixels, lowest, highest)
        for channel in range(image.shape[2]):
            counts[channel] += np.bincount(places[..., channel].reshape(-1), minlength=_VALUES)
    return Channels(counts, len(chosen), lowest, highest)


def _places(pixels: npt.NDArray[Any], least: float, most: float) -> npt.NDArray[np.int64]:
    """Return in which of 256 equal steps from `least` to `most` each number lies."""
    shares = (pixels.astype(np.float64) - least) / max(most - least, np.finfo(np.float64).tiny)
    return np.asarray(np.minimum(shares * _VALUES, _VALUES - 1), np.int64)


def size_histogram(sizes: npt.NDArray[Any]) -> Sizes | None:
    """Count files by their size in bytes, in steps of equal ratio; None where no size is known (0: not known)."""
    known = sizes[sizes > 0].astype(np.float64)
    if not len(known):
        return None
    low, high = known.min(), known.max()
    steps = _BINS if high > low else 1
    places = np.log(known / low) / max(np.log(high / low), np.finfo(float).tiny) * steps
    counts = np.bincount(np.minimum(places.astype(np.int64), steps - 1), minlength=steps)
    middle = float(np.sqrt(low * high))
    return Sizes(counts, int(low), int(middle), int(high), int(np.median(known)), int(known.sum()))
