"""Trains at full size, with sizes that grow, and on the lowest frequencies alone; compares accuracy and time.

    python -m scripts.checks growing_sizes PHOTOGRAPHS --size 64 --runs build/growing-64.jsonl --minutes 9

The runs of a seed differ in nothing else: same cache of `dct-zstd`, same order, same quarter of the photographs to
validate on, always at full size. Finished runs are kept in the file `--runs`, so that the command, run again, continues
where `--minutes` stopped it. Time is the processor's, so that other work on the machine changes nothing.

It fails where the mean accuracy with growing sizes is more than `--within` below that at full size or takes more than
`--share` of its time, or where the lowest frequencies are more than `--within` below all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

from scripts.commands import say
from tpucache import CachedDataset, Recipe, build_cache
from tpucache.loading.split import stratified_split
from tpucache.training import RunOptions, TrainSettings, train

_WAYS: Final = ("full", "grow", "low")
_GROW: Final = {64: "32:0.6,64", 128: "64:0.4,96:0.75,128"}
_LOW: Final = 4  # frequencies of 8


def run(cache: Path, way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train in one way; return the accuracy of the last epoch and the processor's seconds that the run took."""
    data = CachedDataset(cache, in_memory=True)
    split = stratified_split(data.labels.numpy(), 0.25, 0)
    if way == "low":
        shown = CachedDataset(cache, in_memory=True, resolution=options.size, frequencies=_LOW)
        train_set, valid_set = shown.select(split.train), shown.select(split.valid)
    else:
        train_set, valid_set = data.select(split.train), data.select(split.valid)
    settings = TrainSettings(
        model=options.model,
        epochs=options.epochs,
        batch_size=options.batch_size,
        seed=seed,
        grow=options.grow or _GROW[options.size] if way == "grow" else None,
        lr=options.lr,
    )
    began = time.process_time()
    result = train(settings.model, train_set, valid_set, settings, options=RunOptions(replay=False))
    accuracy = float(result.history[-1]["valid_accuracy"])
    return {"way": way, "seed": seed, "accuracy": accuracy, "seconds": time.process_time() - began}


def main() -> int:
    """Run the check as the command line asks; 1 where a bound does not hold, 3 where runs are still to be made."""
    options = _parse()
    torch.set_num_threads(options.cores)
    began = time.monotonic()
    done = [json.loads(line) for line in options.runs.read_text().splitlines()] if options.runs.exists() else []
    known = {(each["way"], each["seed"]): each for each in done}
    longest = max((each["seconds"] for each in done), default=0.0)
    with tempfile.TemporaryDirectory() as work:
        cache = Path(work, "cache")
        build_cache(options.source, cache, Recipe(size=options.size, codec="dct-zstd"), on_error="skip")
        for seed in range(options.seeds):
            for way in _WAYS:
                if (way, seed) in known:
                    continue
                if time.monotonic() - began + longest > 60 * options.minutes:
                    say("the time is up: run the same command again")
                    return 3
                found = run(cache, way, seed, options)
                known[way, seed] = found
                longest = max(longest, found["seconds"])
                options.runs.parent.mkdir(parents=True, exist_ok=True)
                with options.runs.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                say(f"seed {seed}, {way}: {found['accuracy']:.3f} in {found['seconds']:.0f} s")
    return _report({way: [known[way, seed] for seed in range(options.seeds)] for way in _WAYS}, options)


def _report(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> int:
    """Print the figures; return 1 where a bound does not hold."""
    means = {way: statistics.mean(each["accuracy"] for each in runs) for way, runs in found.items()}
    for way, runs in found.items():
        each = ", ".join(f"{one['accuracy']:.3f}" for one in runs)
        seconds = statistics.mean(one["seconds"] for one in runs)
        print(f"{way} at {options.size}: {means[way]:.3f} ({each}), {seconds:.0f} s")
    pairs = zip(found["grow"], found["full"], strict=True)
    share = statistics.median(grown["seconds"] / full["seconds"] for grown, full in pairs)
    growing, low = means["grow"] - means["full"], means["low"] - means["full"]
    print(f"growing: {growing:+.3f} in {share:.2f} of the time; the lowest {_LOW}x{_LOW} frequencies: {low:+.3f}")
    return int(growing < -options.within or low < -options.within or share > options.share)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder of photographs, a folder a class")
    parser.add_argument("--size", type=int, default=64, help="of the images (%(default)s)")
    parser.add_argument("--grow", help=f"sizes by share of the epochs, as `train --grow`; known for {list(_GROW)}")
    parser.add_argument("--runs", type=Path, required=True, metavar="FILE", help="where finished runs are kept")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no run that would end later (%(default)s)")
    parser.add_argument("--model", default="resnet9", help="as `train` takes it (%(default)s)")
    parser.add_argument("--epochs", type=int, default=14, help="of a run (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--lr", type=float, help="as `train` decides it if not given")
    parser.add_argument("--seeds", type=int, default=3, help="runs in each way (%(default)s)")
    parser.add_argument("--cores", type=int, default=1, help="threads of torch (%(default)s)")
    parser.add_argument("--within", type=float, default=0.01, help="allowed loss of accuracy (%(default)s)")
    parser.add_argument("--share", type=float, default=0.7, help="of the time that growing may take (%(default)s)")
    options = parser.parse_args()
    if options.grow is None and options.size not in _GROW:
        parser.error(f"--grow is to be given for a size of {options.size}")
    return options


if __name__ == "__main__":
    sys.exit(main())
