"""Whether weights help: a network learns all classes but two, then these two from few samples; random weights, too.

    python -m scripts.bench fine_tuning clothing --classes hat shoes --samples 20

The folder has `train` and `validation`, each with a folder for each class, such as the small clothing dataset. The
network first learns the other classes. Then, for each seed, it learns the two from a few samples of each, once from
the best weights of that run and once from random ones, with the same samples, steps and rates. Validation is on all
samples of the two that are not learned from.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from scripts.commands import say
from tpucache import CachedDataset, Recipe, build_cache
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training.device import open_device
from tpucache.training.loop import train
from tpucache.training.run_options import RunOptions
from tpucache.training.settings import TrainSettings

WAYS = ("random weights", "weights of the other classes")


def build(folders: list[Path], classes: list[str], cache: Path, size: int) -> None:
    """Build a cache of some classes of one or more folders."""
    source = cache.with_suffix(".source")
    for number, folder in enumerate(folders):
        for name in classes:
            target = source / name
            target.mkdir(parents=True, exist_ok=True)
            for image in sorted((folder / name).iterdir()):
                (target / f"{number}-{image.name}").symlink_to(image.resolve())
    build_cache(source, cache, Recipe(size=size, fit="stretch"), jobs=2)


def split(dataset: CachedDataset, samples: int, seed: int) -> tuple[CachedDataset, CachedDataset]:
    """Return `count` samples of each class, chosen by the seed, and all others."""
    labels, rng = dataset.labels.numpy(), np.random.default_rng(seed)
    chosen = [rng.choice(np.flatnonzero(labels == label), samples, replace=False) for label in np.unique(labels)]
    learned = np.sort(np.concatenate(chosen))
    return dataset.select(learned), dataset.select(np.setdiff1d(np.arange(len(dataset)), learned))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--classes", nargs=2, required=True, help="the two that are learned from few samples")
    parser.add_argument("--samples", type=int, default=20, help="of each of the two")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--first-epochs", type=int, default=8, help="of the other classes")
    parser.add_argument("--epochs", type=int, default=20, help="of the two")
    options = parser.parse_args()
    device, quick = open_device("torch"), RunOptions(replay=False)
    settings = TrainSettings(
        model=options.model,
        epochs=options.first_epochs,
        batch_size=32,
        lr=0.1,
        augment=AugmentSettings(flip=True, shift=4),
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        others = sorted({path.name for path in (options.folder / "train").iterdir()} - {*options.classes})
        build([options.folder / "train"], others, work / "others", options.size)
        build([options.folder / "validation"], others, work / "valid", options.size)
        build([options.folder / part for part in ("train", "validation")], options.classes, work / "two", options.size)
        first = train(
            work / "first", settings, CachedDataset(work / "others"), CachedDataset(work / "valid"), device, quick
        )
        say(f"{len(others)} classes: validation accuracy {first.epochs[first.best_epoch - 1]['valid_accuracy']:.3f}")
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for seed in range(options.seeds):
            parts = split(CachedDataset(work / "two"), options.samples, seed)
            for way, weights in zip(WAYS, (None, str(work / "first")), strict=True):
                again = replace(
                    settings, epochs=options.epochs, batch_size=8, lr=0.02, seed=seed, weights=weights, watch="loss"
                )
                report = train(work / f"{way} {seed}", again, *parts, device, quick)
                accuracy = report.epochs[-1]["valid_accuracy"]
                found[way].append(accuracy)
                say(f"seed {seed}, {way}: accuracy {accuracy:.3f}, AUC {report.epochs[-1]['valid_auc']:.3f}")
        two = " and ".join(options.classes)
        say(f"\n| {options.samples} samples each of {two} | accuracy of {len(parts[1])} others |")
        say("|---|--:|")
        for way, values in found.items():
            say(f"| {way} | {statistics.mean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)}) |")


if __name__ == "__main__":
    main()
