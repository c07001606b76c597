"""Checks of arguments: integers, arrays and indices. Indices follow numpy's rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.errors import OutOfRangeError, UsageError

Positions = npt.NDArray[np.int64]


def to_integer(name: str, value: Any, low: int) -> int:
    """Return the value of the argument `name` as an int. Raises UsageError unless it is an integer from `low` on."""
    array = to_array(name, value)
    if array.ndim or array.dtype.kind not in "iu":
        raise UsageError(f"{name} is a whole number, not {value!r:.100}")
    if int(value) < low:
        raise UsageError(f"{name} is at least {low}, not {value}")
    return int(value)


def to_array(name: str, values: Any) -> npt.NDArray[Any]:
    """Return the values of the argument `name` as a numpy array. Raises UsageError if they cannot be converted."""
    try:
        if hasattr(values, "detach"):  # a torch tensor; numpy lacks bfloat16, which float32 can represent
            values = values.detach().cpu()
            values = values.float() if values.is_floating_point() and values.element_size() < 4 else values
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{name} cannot be read as an array of numbers: {reason:.200}") from error


def overrides(value: object, base: type, method: str) -> bool:
    """Return whether the class of a value overrides a method of `base`."""
    return getattr(type(value), method, None) is not getattr(base, method, None)


def is_single(index: Any) -> bool:
    """Return whether an index means a single sample, such as 3 or a tensor without dimensions."""
    return not isinstance(index, slice) and np.ndim(index) == 0


def to_positions(indices: Any, samples: int, *, from_end: bool = True) -> Positions:
    """Convert a slice, a mask or integers to positions among `samples` samples: int64 (n,), from 0.

    A mask has one bool per sample. Negative integers count from the end if `from_end` is True. The tuple with one array
    that np.nonzero and np.where return is accepted, too.

    Raises UsageError for anything else, OutOfRangeError for integers out of range.
    """
    if isinstance(indices, slice):
        return np.arange(*indices.indices(samples))
    if isinstance(indices, tuple) and len(indices) == 1 and np.ndim(indices[0]) == 1:
        (indices,) = indices
    array = to_array("indices", indices)
    if array.dtype.kind != "b":
        return integer_positions(array, samples, from_end=from_end)
    if array.shape != (samples,):
        raise UsageError(f"a mask for {samples} samples has shape ({samples},), not {array.shape}")
    return np.flatnonzero(array)


def integer_positions(indices: Any, samples: int, *, from_end: bool = True) -> Positions:
    """Convert integers to positions as `to_positions` does, but raise UsageError for masks and slices."""
    array = to_array("indices", indices)
    if array.ndim != 1:
        raise UsageError(f"samples are chosen by a list or array of one dimension, not of {array.ndim}")
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise UsageError(
            f"samples are chosen by whole numbers or a mask, not by {array.dtype}: {array.tolist()!r:.100}"
        )
    low, high = int(array.min()), int(array.max())
    if low < (-samples if from_end else 0) or high >= samples:
        allowed = f"at least {-samples if from_end else 0} and less than {samples}"
        raise OutOfRangeError(f"indices of {samples} samples are {allowed}, not {low} to {high}")
    positions = array.astype(np.int64)
    positions[positions < 0] += samples
    return positions
