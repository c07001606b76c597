"""torchvision: ImageFolder with the transforms of PyTorch's ImageNet example, under a DataLoader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from scripts.bench.peers.epochs.running import Task, run


def make(task: Task) -> Any:
    augmented = transforms.Compose(
        [
            transforms.RandomResizedCrop(task.size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )
    dataset = ImageFolder(task.photographs, augmented)
    return DataLoader(dataset, task.batch, shuffle=True, num_workers=task.workers, persistent_workers=True)


if __name__ == "__main__":
    run(make)
