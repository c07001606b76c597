"""The samples of a cache with columns of the samples table beside their records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.tensors import to_tensor
from tpucache.store.fields import LABEL

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]

#: The name of the columns in a batch.
COLUMNS: Final = "columns"


class ColumnDataset(CachedDataset):
    """A dataset whose samples and batches are dicts that also have `columns`, float32 (…, width)."""

    _values: Array

    @property
    def width(self) -> int:
        """How many values a sample has in its columns."""
        return int(self._values.shape[1])

    @property
    def plain(self) -> CachedDataset:
        """The same samples without columns."""
        return CachedDataset(self.directory, self.variant, self.positions)

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all that decides the samples, their columns among it."""
        values = np.ascontiguousarray(self._values[self.positions])
        return hashlib.sha256(super().digest.encode() + values.tobytes()).hexdigest()

    @property
    def labels(self) -> torch.Tensor:
        """All labels: int64 (n,), or float32 (n, m)."""
        return super().labels_of(np.arange(len(self)))

    def labels_of(self, indices: Array) -> torch.Tensor:
        """Return labels and columns side by side, float64 (n, m + width), which `pack` takes apart.

        float64 holds every float32 and every number of a class.
        """
        labels = super().labels_of(indices)
        columns = to_tensor(self._values[self._selection.positions_of(indices)])
        joined: torch.Tensor = labels.new_zeros((len(labels), self._label_width + self.width)).double()
        joined[:, : self._label_width] = labels.reshape(len(labels), -1)
        joined[:, self._label_width :] = columns
        return joined

    def pack(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a sample's or a batch's fields, columns and label by name."""
        *fields, joined = parts
        like = super().labels_of(np.arange(0))
        labels = joined[..., : self._label_width].to(like.dtype)
        return {
            **dict(zip(self.names, fields, strict=True)),
            COLUMNS: joined[..., self._label_width :].float(),
            LABEL: labels if like.ndim == 2 else labels[..., 0],
        }

    @property
    def _label_width(self) -> int:
        labels = super().labels_of(np.arange(0))
        return int(labels.shape[1]) if labels.ndim == 2 else 1


def add_values(dataset: CachedDataset, values: Array) -> ColumnDataset:
    """Return the samples of a dataset with values beside them, float32 (samples, width). Raises UsageError."""
    if COLUMNS in dataset.names:
        raise UsageError(f"the records have a field {COLUMNS!r} already: columns cannot be inputs beside it")
    whole = np.full((dataset.manifest.samples, values.shape[1]), np.nan, np.float32)
    whole[dataset.positions] = values
    made = object.__new__(ColumnDataset)
    made.__setstate__({**dataset.__getstate__(), "_values": whole})
    return made


def width_of(dataset: CachedDataset) -> int:
    """Return how many values a dataset's samples have in columns: 0 where it has none."""
    return dataset.width if isinstance(dataset, ColumnDataset) else 0
