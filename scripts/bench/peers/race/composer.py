"""Composer: its quick start's trainer and algorithms, label smoothing, BlurPool and channels last."""

from __future__ import annotations

from typing import Any

from composer import Trainer
from composer.algorithms import BlurPool, ChannelsLast, LabelSmoothing
from composer.models import ComposerClassifier
from composer.optim import DecoupledSGDW
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from scripts.bench.peers.race.running import Task, accuracy, network, run

BATCH, WORKERS = 128, 2


def learn(task: Task, epochs: int) -> dict[str, Any]:
    clean = transforms.Compose([transforms.Resize(task.size), transforms.CenterCrop(task.size), transforms.ToTensor()])
    augmented = transforms.Compose([transforms.RandomHorizontalFlip(), clean])
    train_set, valid_set = datasets.ImageFolder(task.train, augmented), datasets.ImageFolder(task.valid, clean)
    model = ComposerClassifier(network(task), num_classes=task.classes)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(train_set, BATCH, shuffle=True, num_workers=WORKERS),
        optimizers=DecoupledSGDW(model.parameters(), lr=0.05, momentum=0.9, weight_decay=2e-3),
        max_duration=f"{epochs}ep",
        algorithms=[LabelSmoothing(smoothing=0.1), BlurPool(), ChannelsLast()],
        device="cpu",
        seed=task.seed,
        progress_bar=False,
        log_to_console=False,
    )
    trainer.fit()
    found = accuracy(model.module, DataLoader(valid_set, BATCH, num_workers=WORKERS))
    return {"accuracy": found, "images": epochs * len(train_set)}


if __name__ == "__main__":
    run(learn)
