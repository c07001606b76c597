"""What users give and get: integers, arrays and indices, checked; and tensors, or arrays if torch is not installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import OutOfRangeError, UsageError

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset, Subset
else:
    try:
        import torch
        from torch.utils.data import Dataset, Subset
    except ModuleNotFoundError as error:
        if error.name != "torch":  # torch is installed, but one of its dependencies is missing
            raise
        torch = None

        class Dataset:
            """Replaces `torch.utils.data.Dataset` as a base class if torch is not installed."""

            def __class_getitem__(cls, _: object) -> type:
                return cls

        class Subset:
            """Replaces `torch.utils.data.Subset` in isinstance checks if torch is not installed."""

            __getitem__: Any = None


HAS_TORCH: Final = torch is not None

__all__ = [
    "HAS_TORCH", "Dataset", "Positions", "SharedNumber", "Subset", "integer_positions", "is_single", "overrides",
    "pinned_empty", "to_array", "to_integer", "to_positions", "to_tensor",
]  # fmt: skip

Positions = npt.NDArray[np.int64]


def to_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the memory of an array; without torch, the array itself."""
    return torch.from_numpy(array) if HAS_TORCH else array  # type: ignore[return-value]  # used as a tensor is


def pinned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array in page-locked memory, from which an accelerator copies asynchronously.

    torch reuses the memory only after the array is freed and all copies from it have ended.
    """
    if not HAS_TORCH:
        raise UsageError("pin_memory needs torch, which is not installed: leave pin_memory out")
    try:
        memory = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, AssertionError) as error:  # what torch raises depends on how it was built
        raise UsageError(f"there is no page-locked memory: {error}. Leave pin_memory out") from error
    return memory.numpy().view(dtype).reshape(shape)


class SharedNumber:
    """An integer. Once it is in shared memory, the worker processes of a DataLoader see its changes."""

    def __init__(self, value: int = 0, *, is_shared: bool = False) -> None:
        self._cell: Any = to_tensor(np.array(value))
        if is_shared:
            self.share()

    def get(self) -> int:
        return int(self._cell)

    def set(self, value: int) -> None:
        self._cell[...] = value

    def share(self) -> None:
        """Move the number into shared memory. Does nothing without torch: then there are no DataLoader workers."""
        if HAS_TORCH:
            self._cell.share_memory_()


def to_integer(name: str, value: Any, low: int) -> int:
    array = to_array(name, value)
    if array.ndim or array.dtype.kind not in "iu":
        raise UsageError(f"{name} is a whole number, not {value!r:.100}")
    if int(value) < low:
        raise UsageError(f"{name} is at least {low}, not {value}")
    return int(value)


def to_array(name: str, values: Any) -> npt.NDArray[Any]:
    try:
        if hasattr(values, "detach"):  # a torch tensor; numpy lacks bfloat16, which float32 can represent
            values = values.detach().cpu()
            values = values.float() if values.is_floating_point() and values.element_size() < 4 else values
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{name} cannot be read as an array of numbers: {reason:.200}") from error


def overrides(value: object, base: type, method: str) -> bool:
    return getattr(type(value), method, None) is not getattr(base, method, None)


def is_single(index: Any) -> bool:
    """Return whether an index means a single sample, such as 3 or a tensor without dimensions."""
    return not isinstance(index, slice) and np.ndim(index) == 0


def to_positions(indices: Any, samples: int, *, from_end: bool = True) -> Positions:
    """Convert a slice, a mask or integers to positions among `samples` samples: int64 (n,), from 0."""
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
