"""Tensors if torch is installed. Otherwise, as in many JAX programs, numpy arrays of the same shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError

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

__all__ = ["HAS_TORCH", "Dataset", "SharedNumber", "Subset", "pinned_empty", "to_tensor"]


def to_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the memory of an array; without torch, the array itself."""
    return torch.from_numpy(array) if HAS_TORCH else array  # type: ignore[return-value]  # used as a tensor is


def pinned_empty(shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return an array in page-locked memory, from which an accelerator copies asynchronously.

    torch reuses the memory only after the array is freed and all copies from it have ended. Raises UsageError without
    torch, or without an accelerator.
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
        """Return the current value, which another process may have set."""
        return int(self._cell)

    def set(self, value: int) -> None:
        """Set the value, for all processes that share it."""
        self._cell[...] = value

    def share(self) -> None:
        """Move the number into shared memory. Does nothing without torch: then there are no DataLoader workers."""
        if HAS_TORCH:
            self._cell.share_memory_()
