"""One torch.save file a sample, under a DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from scripts.bench.peers.reading import Batches, load, run
from scripts.bench.peers.torch_loader import shuffled


class _Files(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(map(str, folder.glob("*.pt")))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = torch.load(self.paths[index])
        return image, label


def write(data: Path, folder: Path) -> None:
    for at, (image, label) in enumerate(zip(*load(data), strict=True)):
        torch.save((torch.tensor(image), int(label)), folder / f"{at:08d}.pt")


def batches(_data: Path, folder: Path, workers: int) -> Batches:
    return shuffled(_Files(folder), workers)


if __name__ == "__main__":
    run(batches, write)
