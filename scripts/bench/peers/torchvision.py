"""A folder of photographs under a DataLoader; transforms, optimizer and rates of PyTorch's ImageNet example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler

from scripts.bench.peers import epochs, training
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


def _transforms(size: int) -> tuple[Any, Any]:
    """Return what the example does with a photograph for training, and for validation."""
    from torchvision import transforms

    last = [transforms.ToTensor(), transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])]
    augmented = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *last]
    clean = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size), *last]
    return transforms.Compose(augmented), transforms.Compose(clean)


def crops(task: epochs.Task) -> Any:
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(task.photographs, _transforms(task.size)[0])
    return DataLoader(dataset, task.batch, shuffle=True, num_workers=task.workers, persistent_workers=True)


def learn(task: training.Task, epochs: int) -> dict[str, Any]:
    loader, valid = training.folders(task, 256, *_transforms(task.size))
    model = training.network(task)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    for _ in range(epochs):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        scheduler.step()
    return {"accuracy": training.accuracy(model, valid), "images": epochs * len(loader.dataset)}


if __name__ == "__main__":
    serve(read=reader(batches, write, lossy=True), epochs=epochs.taker(crops), race=training.learner(learn))
