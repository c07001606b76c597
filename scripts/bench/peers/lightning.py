"""Lightning: its first example's module, with Adam at 1e-3, over torchvision's folders and the example's loaders."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from scripts.bench.peers.protocol import serve
from scripts.bench.peers.training import Task, accuracy, learner, network


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
    from torchvision import datasets, transforms

    whole = transforms.Compose([transforms.Resize(task.size), transforms.CenterCrop(task.size), transforms.ToTensor()])
    train_set, valid_set = (datasets.ImageFolder(folder, whole) for folder in (task.train, task.valid))
    loader: Any = DataLoader(train_set, 64, shuffle=True, num_workers=2)
    module = Classifier(task)
    off: dict[str, Any] = {f"enable_{name}": False for name in ("checkpointing", "progress_bar", "model_summary")}
    lightning.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, **off).fit(module, loader)
    return {"accuracy": accuracy(module.model, DataLoader(valid_set, 64)), "images": epochs * len(train_set)}


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    serve(race=learner(learn))
