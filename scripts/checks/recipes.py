"""Trains with each recipe and with the defaults, for several models, as a Markdown table: accuracy and what it cost.

    python -m scripts.checks recipes PHOTOGRAPHS --models cnn resnet18 timm:convnext_atto

Runs of a model have the same samples and batches. `--epochs` gives all of them the same number of epochs; without it
each recipe has its own. The recipe finetune is left out where `--weights` has none for a model. It prints what each has
set.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from scripts.commands import say
from tpucache import CachedDataset, Recipe, build_cache
from tpucache.loading.split import stratified_split
from tpucache.training import RunOptions, TrainResult, TrainSettings, recipe_settings, train
from tpucache.training.recipes import RECIPES

_DEFAULTS: Final = "none"


def settings_of(recipe: str, seed: int, **given: Any) -> TrainSettings:
    """Return the settings of a recipe, or the defaults, for a run with what is given."""
    given = {name: value for name, value in given.items() if value is not None} | {"seed": seed}
    return TrainSettings(**given) if recipe == _DEFAULTS else recipe_settings(recipe, **given)


def row(recipe: str, model: str, results: list[TrainResult], epochs: int) -> str:
    """Return a row of the table: mean and spread of the best accuracies, images a second, and seconds."""
    best = [max(float(each["valid_accuracy"]) for each in result.history) for result in results]
    spread = f" ± {statistics.stdev(best):.3f}" if len(best) > 1 else ""
    rate = statistics.mean(result.report.pace.images_per_second for result in results)
    seconds = statistics.mean(result.report.wall_seconds for result in results)
    return f"| {recipe} | `{model}` | {epochs} | {statistics.mean(best):.3f}{spread} | {rate:,.0f} | {seconds:,.0f} |"


def main() -> int:
    """Run the check as the command line asks."""
    options = _parse()
    torch.set_num_threads(options.cores)
    weights = dict(text.split("=", 1) for text in options.weights)
    rows, texts = [], dict[str, str]()
    with tempfile.TemporaryDirectory() as work:
        cache = Path(work, "cache")
        build_cache(options.source, cache, Recipe(size=options.size, codec="raw"), on_error="skip", jobs=options.cores)
        data = CachedDataset(cache, in_memory=True)
        split = stratified_split(data.labels.numpy(), 1 - options.samples / len(data), 0)
        parts = data.select(split.train), data.select(split.valid[:: max(1, len(split.valid) // options.valid)])
        for model in options.models:
            for recipe in options.recipes:
                if recipe == "finetune" and model not in weights:
                    continue
                given = {"model": model, "batch_size": options.batch_size, "epochs": options.epochs}
                given["weights"] = weights.get(model) if recipe == "finetune" else None
                all_settings = [settings_of(recipe, seed, **given) for seed in range(options.seeds)]
                results = [
                    train(model, *parts, settings, device=options.device, options=RunOptions(replay=False))
                    for settings in all_settings
                ]
                texts[recipe] = all_settings[0].recipe or "none: the defaults"
                rows.append(row(recipe, model, results, all_settings[0].passes))
                say(rows[-1])
    print(*(f"- {text}" for text in texts.values()), "", sep="\n")
    print("| recipe | model | epochs | best accuracy | images/s | seconds |\n|---|---|---:|---:|---:|---:|")
    print(*rows, sep="\n")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder of photographs, a folder a class")
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet18"], help="%(default)s")
    parser.add_argument("--recipes", nargs="+", default=[_DEFAULTS, *RECIPES], choices=[_DEFAULTS, *RECIPES])
    parser.add_argument("--weights", nargs="*", default=[], metavar="MODEL=FILE", help="what finetune begins with")
    parser.add_argument("--epochs", type=int, help="of each run; each recipe's own if not given")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--size", type=int, default=64, help="of the images (%(default)s)")
    parser.add_argument("--samples", type=int, default=2000, help="to train on (%(default)s)")
    parser.add_argument("--valid", type=int, default=1000, help="to validate on, of the others, at least (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--device", default="torch", help="a backend or a device (%(default)s)")
    parser.add_argument("--cores", type=int, default=2, help="threads of torch (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
