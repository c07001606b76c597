"""Checks of arguments: whole numbers, arrays and indices, which follow numpy's rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.errors import OutOfRangeError, UsageError

Positions = npt.NDArray[np.int64]


def to_integer(name: str, value: Any, low: int) -> int:
    """Return an argument as an int; numpy's and torch's whole numbers are accepted. Raises UsageError below `low`."""
    array = to_array(name, value)
    if array.ndim or array.dtype.kind not in "iu":
        raise UsageError(f"{name} is a whole number, not {value!r:.100}")
    if int(value) < low:
        raise UsageError(f"{name} is at least {low}, not {value}")
    return int(value)


def to_array(name: str, values: Any) -> npt.NDArray[Any]:
    """Return a caller's values as a numpy array; a tensor may be on any device. Raises UsageError."""
    try:
        if hasattr(values, "detach"):  # one of torch, which knows types that numpy lacks: float32 holds bfloat16
            values = values.detach().cpu()
            values = values.float() if values.is_floating_point() and values.element_size() < 4 else values
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{name} cannot be read as an array of numbers: {reason:.200}") from error


def overrides(value: object, base: type, method: str) -> bool:
    """Return whether the class of a value overrides a method of `base`."""
    return getattr(type(value), method) is not getattr(base, method)


def is_single(index: Any) -> bool:
    """Return whether an index is one sample, like 3 or a tensor without dimensions."""
    return not isinstance(index, slice) and np.ndim(index) == 0


def to_positions(indices: Any, samples: int, *, from_end: bool = True) -> Positions:
    """Return the positions that a slice, a mask or whole numbers mean among `samples` samples: int64 (n,), from 0.

    A mask holds one bool a sample. Negative numbers count from the end where `from_end` allows it. The tuple of one
    array that np.nonzero and np.where give is taken as the array.

    Raises UsageError for anything else, OutOfRangeError for numbers outside of the samples.
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
    """Return whole numbers, and nothing else, as `to_positions` does; a list of bools is not a mask here."""
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
