"""What all contenders of the race share: the network, how many epochs fit into the time, the line of their answer."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Task:
    """What is asked: a network by name, folders of photographs, a folder a class, size in pixels, time, and a seed.

    `epochs` is how many fit into the time, None where that has to be seen first.
    """

    model: str
    train: Path
    valid: Path
    work: Path
    size: int
    seconds: float
    seed: int
    epochs: int | None = None

    @property
    def classes(self) -> int:
        """The number of classes."""
        return sum(path.is_dir() for path in self.train.iterdir())


def run(train: Callable[[Task, int], dict[str, Any]], prepare: Callable[[Task], None] = lambda task: None) -> None:
    """Prepare the data, train for as many epochs as fit into the time, and print the result.

    `train` takes the task and a number of epochs, and returns the `accuracy` on the validation photographs and the
    `images` that it trained on.
    """
    given = json.loads(sys.argv[1])
    task = Task(**{**given, **{name: Path(given[name]) for name in ("train", "valid", "work")}})
    began = time.monotonic()
    prepare(task)
    prepared = time.monotonic() - began
    epochs = task.epochs or _fitting(task, train)
    seed(task.seed)
    began = time.monotonic()
    result = train(task, epochs)
    seconds = time.monotonic() - began
    print(json.dumps({**result, "epochs": epochs, "seconds": seconds, "prepare_seconds": prepared}), flush=True)


def seed(number: int) -> None:
    """Seed what draws random numbers."""
    import numpy as np
    import torch

    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def network(task: Task) -> Any:
    """Return the network with random weights, the same for all: one of tpucache's or of timm's."""
    from tpucache.training.learn.model import build_model

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
