"""What callers pass, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError


def to_integer(name: str, value: Any, low: int) -> int:
    """Return an argument as an int; also numpy's and torch's whole numbers are ones. Raises UsageError below `low`."""
    array = to_array(name, value)
    if array.ndim or array.dtype.kind not in "iu":
        raise UsageError(f"{name} is a whole number, not {value!r:.100}")
    if int(value) < low:
        raise UsageError(f"{name} is at least {low}, not {value}")
    return int(value)


def to_array(name: str, values: Any) -> npt.NDArray[Any]:
    """Return what a caller gave as a numpy array; of a tensor, on any device, its values. Raises UsageError."""
    try:
        if hasattr(values, "detach"):  # one of torch, which knows types that numpy lacks: float32 holds bfloat16
            values = values.detach().cpu()
            values = values.float() if values.is_floating_point() and values.element_size() < 4 else values
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{name} cannot be read as an array of numbers: {reason:.200}") from error


def overrides(value: object, base: type, method: str) -> bool:
    """Return whether a value is of a subclass of `base` with a method of its own of this name."""
    return getattr(type(value), method) is not getattr(base, method)
