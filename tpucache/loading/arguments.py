"""What callers pass, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from tpucache.errors import UsageError


def to_integer(name: str, value: Any, low: int) -> int:
    """Return an argument as an int; also numpy's and torch's whole numbers are ones. Raises UsageError below `low`."""
    if np.ndim(value) or np.asarray(value).dtype.kind not in "iu":
        raise UsageError(f"{name} is a whole number, not {value!r}")
    if int(value) < low:
        raise UsageError(f"{name} is at least {low}, not {value}")
    return int(value)


def overrides(value: object, base: type, method: str) -> bool:
    """Return whether a value is of a subclass of `base` with a method of its own of this name."""
    return getattr(type(value), method) is not getattr(base, method)
