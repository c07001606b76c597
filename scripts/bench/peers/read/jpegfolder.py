"""A folder of presized JPEG files of quality 95, decoded by Pillow under a DataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from scripts.bench.peers.reading import Batches, load, run
from scripts.bench.peers.torch_loader import shuffled


class _Photos(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(map(str, folder.glob("*/*.jpg")))
        self.labels = [int(Path(path).parent.name) for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.paths[index]) as image:
            return torch.from_numpy(np.array(image)), self.labels[index]


def write(data: Path, folder: Path) -> None:
    for at, (image, label) in enumerate(zip(*load(data), strict=True)):
        path = folder / str(label) / f"{at:08d}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.asarray(image)).save(path, quality=95)


def batches(_data: Path, folder: Path, workers: int) -> Batches:
    return shuffled(_Photos(folder), workers)


if __name__ == "__main__":
    run(batches, write, lossy=True)
