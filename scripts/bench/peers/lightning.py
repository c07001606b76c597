"""Lightning: its first example's module, with Adam at 1e-3, over torchvision's folders and the example's loaders."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
import torch

from scripts.bench.peers.protocol import serve
from scripts.bench.peers.training import Task, accuracy, folders, learner, network


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
    from torchvision import transforms

    whole = transforms.Compose([transforms.Resize(task.size), transforms.CenterCrop(task.size), transforms.ToTensor()])
    loader, valid = folders(task, 64, whole, whole)
    module = Classifier(task)
    off: dict[str, Any] = {f"enable_{name}": False for name in ("checkpointing", "progress_bar", "model_summary")}
    lightning.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, **off).fit(module, loader)
    return {"accuracy": accuracy(module.model, valid), "images": epochs * len(loader.dataset)}


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    serve(race=learner(learn))
