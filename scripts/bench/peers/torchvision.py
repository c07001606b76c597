"""A folder of photographs under a DataLoader, with the transforms of PyTorch's ImageNet example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler

from scripts.bench.peers.epochs import Task, taker
from scripts.bench.peers.protocol import serve
from scripts.bench.peers.reading import BATCH, PASSES, Batches, load, reader


class _Photos(Dataset[Any]):
    """JPEG files of the wanted size, decoded by Pillow: without torchvision, whose newest torch is not here."""

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
    dataset: Any = _Photos(folder)
    sampler = RandomSampler(dataset, num_samples=PASSES * len(dataset))
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0, "drop_last": True}
    loader = DataLoader(dataset, BATCH, sampler=sampler, **options)
    while True:
        yield from loader


def crops(task: Task) -> Any:
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    change = transforms.Compose(
        [
            transforms.RandomResizedCrop(task.size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    dataset = ImageFolder(task.photographs, change)
    return DataLoader(dataset, task.batch, shuffle=True, num_workers=task.workers, persistent_workers=True)


if __name__ == "__main__":
    serve(read=reader(batches, write, lossy=True), epochs=taker(crops))
