"""np.memmap under a DataLoader: `__getitems__` takes a whole batch by one index, nothing collates it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from scripts.bench.peers.reading import Batches, load, run
from scripts.bench.peers.torch_loader import shuffled


class _Memmap(Dataset[Any]):
    def __init__(self, data: Path) -> None:
        self.images, self.labels = load(data)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, rows: list[int]) -> tuple[Any, Any]:
        return torch.from_numpy(self.images[rows]), torch.from_numpy(self.labels[rows])


def _as_it_is(batch: Any) -> Any:
    return batch


def batches(data: Path, _folder: Path, workers: int) -> Batches:
    return shuffled(_Memmap(data), workers, _as_it_is)


if __name__ == "__main__":
    run(batches)
