"""Trains with the default rate and with others around it, for each optimizer and several models, as a Markdown table.

    python -m scripts.checks rates PHOTOGRAPHS --models cnn resnet18 timm:convnext_atto

All runs of a pair have the same seed, samples, weight decay and schedule, and differ in nothing but the rate. It fails
where the default's accuracy, that of its last epoch, is more than `--within` below the best of the pair's rates.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from scripts.commands import say
from tpucache import CachedDataset, Recipe, TrainingError, build_cache
from tpucache.loading.split import stratified_split
from tpucache.training import RunOptions, TrainSettings, train
from tpucache.training.learn.defaults import decide_rates
from tpucache.training.learn.model import build_model
from tpucache.training.settings import OPTIMIZERS

_TIMES: Final = (0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Trial:
    """A pair of optimizer and model: its default settings, and the accuracy at each multiple of their rate."""

    settings: TrainSettings
    accuracies: dict[float, float]

    @property
    def loss(self) -> float:
        """How far the default's accuracy is below the best."""
        return max(self.accuracies.values()) - self.accuracies[1.0]

    def row(self) -> str:
        """Return the pair's row of the table."""
        settings = self.settings
        name = f"{settings.optimizer} | `{settings.model}` | {settings.peak_lr:.2g}"
        return f"| {name} | {' | '.join(f'{value:.3f}' for value in self.accuracies.values())} | {self.loss:.3f} |"


def accuracy_of(settings: TrainSettings, train_set: CachedDataset, valid_set: CachedDataset) -> float:
    """Train, and return the validation accuracy of the last epoch, 0 for a run that diverged."""
    try:
        result = train(settings.model, train_set, valid_set, settings, options=RunOptions(replay=False))
    except TrainingError as error:
        say(str(error))
        return 0.0
    return float(result.history[-1]["valid_accuracy"])


def try_rates(settings: TrainSettings, train_set: CachedDataset, valid_set: CachedDataset) -> Trial:
    """Train with the default rate of an optimizer and a model, and with multiples of it."""
    decided = decide_rates(settings, build_model(settings.model, len(train_set.classes)))
    accuracies = {}
    for times in _TIMES:
        accuracies[times] = accuracy_of(replace(decided, lr=(decided.lr or 0.0) * times), train_set, valid_set)
        say(f"{settings.optimizer}, {settings.model}, {times:g} x {decided.peak_lr:.3g}: {accuracies[times]:.3f}")
    return Trial(decided, accuracies)


def main() -> int:
    """Run the check as the command line asks; 1 where a default is too far from the best rate."""
    options = _parse()
    torch.set_num_threads(options.cores)
    with tempfile.TemporaryDirectory() as work:
        cache = Path(work, "cache")
        build_cache(options.source, cache, Recipe(size=options.size, codec="raw"), on_error="skip", jobs=options.cores)
        data = CachedDataset(cache, in_memory=True)
        split = stratified_split(data.labels.numpy(), 1 - options.samples / len(data), 0)
        train_set, valid_set = (
            data.select(split.train),
            data.select(split.valid[:: max(1, len(split.valid) // options.valid)]),
        )
        trials = [
            try_rates(
                TrainSettings(
                    model=model,
                    optimizer=optimizer,
                    epochs=options.epochs,
                    batch_size=options.batch_size,
                ),
                train_set,
                valid_set,
            )
            for model in options.models
            for optimizer in OPTIMIZERS
        ]
    heads = [f"{times:g} x" if times != 1 else "default" for times in _TIMES]
    print(f"| optimizer | model | default rate | {' | '.join(heads)} | below the best |")
    print(f"|---|---|{'---:|' * (len(heads) + 2)}")
    print(*(trial.row() for trial in trials), sep="\n")
    return int(any(trial.loss > options.within for trial in trials))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder of photographs, a folder a class")
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet18", "timm:convnext_atto"], help="%(default)s")
    parser.add_argument("--size", type=int, default=32, help="of the images (%(default)s)")
    parser.add_argument("--samples", type=int, default=1000, help="to train on (%(default)s)")
    parser.add_argument("--valid", type=int, default=700, help="to validate on, of the others, at least (%(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="of a run (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--cores", type=int, default=1, help="threads of torch (%(default)s)")
    parser.add_argument("--within", type=float, default=0.05, help="allowed distance from the best (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
