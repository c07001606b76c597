"""Rows copied into a batch: past the processor's caches where that is faster and possible."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.loading.records.compiled.native import native

Array = npt.NDArray[Any]
Addresses = npt.NDArray[np.int64]

_LARGE: Final = 8 << 20  # of a smaller batch much is still in the cache when it is read: ordinary stores are as fast
_LONG: Final = 1 << 10  # bytes of a row; shorter ones have too few whole lines


def is_large(rows: int, nbytes: int) -> bool:
    """Return whether a batch of so many rows and bytes is copied faster past the caches."""
    return nbytes >= max(_LARGE, rows * _LONG)


def address(array: Array) -> int:
    """Return where an array's memory begins."""
    found: int = array.__array_interface__["data"][0]
    return found


def copy_rows(targets: Addresses, sources: Addresses, length: int, *, past_caches: bool) -> None:
    """Copy `length` bytes from each source to its target, both given by their addresses: int64 (n,), contiguous.

    Threads may do so at once. The caller keeps the memory alive, and checks that it is large enough.
    """
    loops = native() if past_caches else None
    if loops is not None:
        loops.copy(address(targets), address(sources), len(targets), length)
        return
    move = ctypes.memmove
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        move(target, source, length)


def gather(source: Array, rows: npt.NDArray[np.int64], target: Array) -> None:
    """Copy rows into `target`: target[i] = source[rows[i]]. Threads may do so at once.

    `source` is (n, *shape), `target` (m, *shape), `rows` (m,). Raises IndexError for a row that is not there,
    ValueError where the target has another shape, TypeError where it has another dtype.
    """
    _check_fit(source, len(rows), target)
    if len(rows) and not (rows.min() >= 0 and rows.max() < len(source)):
        raise IndexError(f"rows reach from {rows.min()} to {rows.max()}, of {len(source)}")
    large = is_large(len(rows), target.nbytes) and source.flags.c_contiguous and target.flags.c_contiguous
    if not large or native() is None:
        # "clip" is what lets numpy write into the target at once.
        np.take(source, rows, axis=0, out=target, mode="clip")
        return
    length = target.nbytes // len(rows)
    targets = address(target) + length * np.arange(len(rows))
    copy_rows(targets, address(source) + length * rows.astype(np.int64), length, past_caches=True)


def _check_fit(source: Array, rows: int, target: Array) -> None:
    """Refuse another shape or dtype: the compiled loop looks at addresses alone, and numpy may cast silently."""
    shape = (rows, *source.shape[1:])
    if target.shape != shape:
        raise ValueError(f"the target of {rows} rows should have shape {shape}, not {target.shape}")
    if target.dtype != source.dtype:
        raise TypeError(f"the target should have dtype {source.dtype}, not {target.dtype}")
