"""tpucache: `warmup --variants 4`, and `train` with its defaults."""

from __future__ import annotations

import shutil
from typing import Any

from scripts.bench.peers.race.running import Task, run
from tpucache import CachedDataset, Recipe, build_cache
from tpucache.training import RunOptions, TrainSettings, train


def prepare(task: Task) -> None:
    shutil.rmtree(task.work, ignore_errors=True)
    build_cache(task.train, task.work / "train", Recipe(size=task.size, variants=4))
    build_cache(task.valid, task.work / "valid", Recipe(size=task.size), classes=task.work / "train")


def learn(task: Task, epochs: int) -> dict[str, Any]:
    settings = TrainSettings(epochs=epochs, seed=task.seed)
    dataset, valid = CachedDataset(task.work / "train", "epoch"), CachedDataset(task.work / "valid")
    result = train(task.model, dataset, valid, settings, options=RunOptions(replay=False))
    return {"accuracy": result.history[-1]["valid_accuracy"], "images": epochs * len(dataset)}


if __name__ == "__main__":
    run(learn, prepare)
