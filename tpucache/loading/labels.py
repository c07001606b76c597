"""A cache's labels as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tpucache.loading.tensors import to_tensor
from tpucache.store.samples import NO_LABEL

if TYPE_CHECKING:
    import torch


def label_tensor(labels: npt.NDArray[Any] | None, positions: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return the labels of the samples at some positions of a table: int64 (n,), or float32 (n,) or (n, m).

    They are -1 where the table has none.
    """
    if labels is None:
        return to_tensor(np.full(len(positions), NO_LABEL))
    return to_tensor(labels[positions].astype(np.float32 if labels.dtype.kind == "f" else np.int64))
