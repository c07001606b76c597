"""Runs as most tests need them, on plain torch and without the replay at their end; and what they leave."""

from __future__ import annotations

import csv
import json
import shutil
from typing import Any

import torch

from tpucache import CachedDataset
from tpucache.cli import main
from tpucache.training import Learner, PredictOptions, Predictor, RunOptions, load_checkpoint
from tpucache.training.data import choose_task
from tpucache.training.device import CpuDevice
from tpucache.training.loop import train
from tpucache.warmup import TableOptions, relabel_cache

#: Code of tests that runs may name.
TRUST = (
    "tiny_models:tiny", "tiny_tasks:linear", "tiny_tasks:Bag", "tiny_tasks:reversed_eval", "failing_code:dense",
    "test_inputs:age_and_image",
)  # fmt: skip


def train_on(run, settings, train_set, valid_set=None, device=None, **options):
    given = RunOptions(**{"replay": False, **options})
    return train(run, settings, train_set, valid_set, device or CpuDevice(), given)


def learner_on(settings, dataset, device=None):
    return Learner(settings, dataset, choose_task(settings, dataset), device or CpuDevice())


def predictor_of(*runs, device=None, trust=TRUST, **options):
    return Predictor(runs, device or CpuDevice(), trust, PredictOptions(**options))


def with_folds(cache, folder, names):
    """A copy of a cache whose samples are in folds, by turns."""
    shutil.copytree(cache, folder / "cache")
    rows = [(path, names[number * 5 // 7 % len(names)]) for number, path in enumerate(CachedDataset(cache).paths)]
    with (folder / "folds.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "part"), *rows])
    relabel_cache(folder / "cache", folder / "folds.csv", TableOptions(fold_col="part"))
    return folder / "cache"


def plain_outputs(model, dataset, mean, std):
    """A model's outputs for all samples at once, by nothing but torch."""
    images = torch.stack([dataset[index][0] for index in range(len(dataset))]).float()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    with torch.no_grad():
        return model((images - mean) / std)


class EndAfter:
    """A watcher that ends a run when this epoch has ended, as a kill does."""

    def __init__(self, epoch: int | None) -> None:
        self._epoch = epoch

    def losses(self, first: int, values: Any) -> None: ...

    def epoch(self, row: dict[str, Any]) -> None:
        if row["epoch"] == self._epoch:
            raise KeyboardInterrupt


def command(*words: object) -> int:
    return main([str(word) for word in words])


def report_of(run):
    return json.loads((run / "report.json").read_text())


def rows_of(table):
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def best_of(run):
    return load_checkpoint(run / "best.pt")


def last_of(run):
    return load_checkpoint(run / "last.pt")
