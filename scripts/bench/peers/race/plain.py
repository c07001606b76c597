"""A plain loop: transforms, SGD and rates of PyTorch's own ImageNet example (github.com/pytorch/examples)."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from scripts.bench.peers.race.running import Task, accuracy, network, run

BATCH, WORKERS = 256, 2


def learn(task: Task, epochs: int) -> dict[str, Any]:
    normalise = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    augmented = transforms.Compose(
        [
            transforms.RandomResizedCrop(task.size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            normalise,
        ]
    )
    clean = transforms.Compose(
        [transforms.Resize(task.size * 8 // 7), transforms.CenterCrop(task.size), transforms.ToTensor(), normalise]
    )
    train_set, valid_set = datasets.ImageFolder(task.train, augmented), datasets.ImageFolder(task.valid, clean)
    loader = DataLoader(train_set, BATCH, shuffle=True, num_workers=WORKERS)
    model = network(task)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    for _ in range(epochs):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
        scheduler.step()
    found = accuracy(model, DataLoader(valid_set, BATCH, num_workers=WORKERS))
    return {"accuracy": found, "images": epochs * len(train_set)}


if __name__ == "__main__":
    run(learn)
