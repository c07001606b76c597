"""What all contenders of the race share: the network, how many epochs fit into the time, and the accuracy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.peers.protocol import Commands, Role, Setting


@dataclass(frozen=True)
class Task:
    """What is asked: a network by name, folders of photographs, a folder a class, size in pixels, time, and a seed.

    `epochs` is how many fit into the time, None where that has to be seen first.
    """

    model: str
    train: str
    valid: str
    work: str
    size: int
    seconds: float
    seed: int
    epochs: int | None = None

    @property
    def classes(self) -> int:
        return sum(path.is_dir() for path in Path(self.train).iterdir())


def learner(train: Callable[[Task, int], dict[str, Any]], prepare: Callable[[Task], None] = lambda task: None) -> Role:
    """Return the role of `train(task, epochs)`: `accuracy` on the validation photographs, and `images` trained on."""

    def begin(setting: Setting) -> Commands:
        task = Task(**setting)
        return {"go": lambda _: learn(task, train, prepare)}

    return begin


def learn(task: Task, train: Callable[[Task, int], dict[str, Any]], prepare: Callable[[Task], None]) -> dict[str, Any]:
    """Prepare the data, train for as many epochs as fit into the time, and return the result."""
    preparation = _seconds(lambda: prepare(task))
    epochs = task.epochs or _fitting(task, train)
    seed(task.seed)
    began = time.monotonic()
    result = train(task, epochs)
    return {**result, "epochs": epochs, "seconds": time.monotonic() - began, "prepare_seconds": preparation}


def seed(number: int) -> None:
    """Seed what draws random numbers."""
    import numpy as np
    import torch

    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def network(task: Task) -> Any:
    """Return the network with random weights, the same for all: one of tpucache's or of timm's."""
    from tpucache.training.model import build_model

    return build_model(task.model, task.classes)


def accuracy(model: Any, loader: Any) -> float:
    """Return the share of a loader's images whose class a model finds."""
    import torch

    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((model(images).argmax(1) == labels).sum())
            total += len(labels)
    model.train()
    return right / total


def _fitting(task: Task, train: Callable[[Task, int], object]) -> int:
    """Return how many epochs fit into the time, by the faster of two: the second has files in the page cache."""
    seed(task.seed)
    epoch = _seconds(lambda: train(task, 1))
    epoch = min(epoch, _seconds(lambda: train(task, 1))) if epoch < task.seconds / 4 else epoch
    return max(1, int(task.seconds / epoch))


def _seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
