"""Lightning: its first example's module, with Adam at 1e-3, over torchvision's folders and the example's loaders."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from scripts.bench.peers.race.running import Task, accuracy, network, run

BATCH, WORKERS = 64, 2


class Classifier(lightning.LightningModule):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model = network(task)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def learn(task: Task, epochs: int) -> dict[str, Any]:
    transform = transforms.Compose(
        [transforms.Resize(task.size), transforms.CenterCrop(task.size), transforms.ToTensor()]
    )
    train_set, valid_set = datasets.ImageFolder(task.train, transform), datasets.ImageFolder(task.valid, transform)
    module = Classifier(task)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(train_set, BATCH, shuffle=True, num_workers=WORKERS))
    found = accuracy(module.model, DataLoader(valid_set, BATCH, num_workers=WORKERS))
    return {"accuracy": found, "images": epochs * len(train_set)}


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    run(learn)
