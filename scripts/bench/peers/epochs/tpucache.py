"""tpucache: ImageFolder and CachedLoader in one program, or the command `warmup` and then a program."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from scripts.bench.peers.epochs.running import Task, run


def make(task: Task) -> Any:
    if task.way == "warmup" and not task.folder.exists():
        words = ["warmup", str(task.photographs), str(task.folder), "--size", str(task.side)]
        subprocess.run([sys.executable, "-m", "tpucache", *words], check=True, stdout=subprocess.DEVNULL)
    # Imported here: a program that reads starts after the command has ended.
    from tpucache import CachedDataset, CachedLoader, ImageFolder
    from tpucache.ondevice import AugmentSettings

    dataset: Any = (
        CachedDataset(task.folder)
        if task.way == "warmup"
        else ImageFolder(task.photographs, size=task.side, cache=task.folder)
    )
    augment = AugmentSettings(crop=True, flip=True)
    return CachedLoader(dataset, task.batch, shuffle=True, augment=augment, size=task.size)


if __name__ == "__main__":
    run(make)
