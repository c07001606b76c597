"""A cache's labels, checked before anything learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import FormatError
from tpucache.loading.tensors import to_tensor
from tpucache.store.samples import SampleTable

if TYPE_CHECKING:
    import torch

Labels = npt.NDArray[Any]

NO_LABEL: Final = -1


class SampleLabels:
    """The labels of a cache's samples, checked when they are first used."""

    def __init__(self, table: SampleTable, classes: Sequence[str]) -> None:
        """Take the samples table and the names of the classes; nothing is read yet."""
        self._table = table
        self._classes = classes
        self._is_checked = False

    # A plain property: a cached one holds a lock in Python 3.10 and 3.11, which a process forked meanwhile gets locked.
    @property
    def array(self) -> Labels | None:
        """All labels as the table has them, or None where there are none. Raises FormatError."""
        labels = self._table.labels
        if not self._is_checked:
            check_labels(labels, self._classes)
            self._is_checked = True
        return labels

    def tensor(self, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the labels of samples: int64 (n,), -1 where the cache has none, or float32 (n,) or (n, m).

        Raises FormatError.
        """
        labels = self.array
        if labels is None:
            return to_tensor(np.full(len(positions), NO_LABEL))
        return to_tensor(labels[positions].astype(np.float32 if labels.dtype.kind == "f" else np.int64))


def check_labels(labels: Labels | None, classes: Sequence[str]) -> None:
    """Raise FormatError for class numbers without a class, and for values that int64 or float32 cannot hold."""
    if labels is None or not labels.size:
        return
    if labels.dtype.kind == "f":
        with np.errstate(over="ignore"):
            is_lost = np.isfinite(labels) & ~np.isfinite(labels.astype(np.float32))
        if is_lost.any():
            raise FormatError(f"{int(is_lost.sum())} labels are beyond float32, such as {labels[is_lost][0]}")
        return
    low, high = int(labels.min()), int(labels.max())
    if high > np.iinfo(np.int64).max:
        raise FormatError(f"labels reach to {high}, beyond int64")
    if classes and labels.ndim == 1 and (low < NO_LABEL or high >= len(classes)):
        raise FormatError(
            f"labels reach from {low} to {high}, but the cache has {len(classes)} classes: build it again"
        )
