"""What all contenders of the epochs benchmark share: takes all batches, and says when the first and the last came.

The seconds count from the start of the process, before anything is imported. Needs the standard library alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.peers.protocol import Commands, Role, Setting


@dataclass(frozen=True)
class Task:
    """What is asked: crops of `size` pixels of photographs, a folder a class, in batches, for some epochs.

    `side` is that of the pictures in a cache, which is made in `folder`, or found there. `began` is the moment, by
    `time.monotonic`, at which the process was started. `way` is one of the contender's ways of doing it.
    """

    photographs: str
    folder: str
    side: int
    size: int
    batch: int
    epochs: int
    workers: int
    began: float
    way: str = ""

    def files(self) -> tuple[list[str], list[int]]:
        """Return the paths of the photographs and the number of each one's class, in order."""
        classes = sorted(path for path in Path(self.photographs).iterdir() if path.is_dir())
        found = [(str(path), label) for label, each in enumerate(classes) for path in sorted(each.iterdir())]
        return [path for path, _ in found], [label for _, label in found]


def taker(make: Callable[[Task], Iterable[tuple[Any, Any]]]) -> Role:
    """Return the role of `make(task)`, whose batches are normalised images, float32 (n, 3, size, size), and labels."""

    def begin(setting: Setting) -> Commands:
        task = Task(**setting)
        return {"go": lambda _: take(make(task), task)}

    return begin


def take(loader: Iterable[tuple[Any, Any]], task: Task) -> dict[str, Any]:
    """Take the batches of all epochs, and return the times."""
    images, ends = 0, []
    first = None
    for _ in range(task.epochs):
        for batch, labels in loader:
            shape = tuple(batch.shape)
            if shape[1:] != (3, task.size, task.size) or str(batch.dtype) != "torch.float32" or len(labels) != shape[0]:
                raise ValueError(f"a batch of {shape}, {batch.dtype}, with {len(labels)} labels")
            float(batch[-1, -1, -1, -1])
            images += shape[0]
            first = first or time.monotonic() - task.began
        ends.append(time.monotonic() - task.began)
    return {"images": images, "first_batch": first, "epoch_ends": ends}
