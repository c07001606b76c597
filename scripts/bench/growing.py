"""The first epoch on a cache that is built meanwhile, compared with warmup alone, later epochs and a plain DataLoader.

    python -m scripts.bench growing PHOTOGRAPHS --size 224 --rounds 3
    python -m scripts.bench growing PHOTOGRAPHS --device-rate 2000

Each round takes, in new folders and processes that have imported nothing yet, as a new notebook: `open_or_build` and
its epochs; `build_cache` and as many epochs; a DataLoader with a worker for each core that decodes and resizes with
Pillow. Imports count. A round before the first one is not counted: it reads the photographs into the page cache, and
writes the bytecode of all modules, as pip does. Nothing learns: it is how long batches take. With `--device-rate`,
each batch waits as long as a device of that many images a second computes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from scripts.bench.rounds import race
from scripts.bench.table import Rows, add_race_options, parse_options, show
from scripts.commands import ROOT

_MEASURED: Final = """
import json, os, sys, time
from pathlib import Path
began = time.monotonic()

class Photographs:
    def __init__(self, root, size):
        self.paths = sorted(path for path in Path(root).rglob("*") if path.suffix.lower() in {".jpg", ".jpeg", ".png"})
        self.size = size

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        import numpy as np
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            image.draft("RGB", (self.size, self.size))
            return np.array(image.convert("RGB").resize((self.size, self.size)))

def make_loader(way, photographs, size, batch_size):
    if way == "DataLoader":
        from torch.utils.data import DataLoader

        dataset, cores = Photographs(photographs, size), len(os.sched_getaffinity(0))
        return dataset, DataLoader(dataset, batch_size, shuffle=True, num_workers=cores, persistent_workers=True)
    from tpucache import Recipe, build_cache, open_or_build

    recipe = Recipe(size=size)
    if way == "open_or_build":
        dataset = open_or_build(photographs, "cache", recipe)
    else:
        build_cache(photographs, "cache", recipe)
    from tpucache import CachedDataset, CachedLoader

    dataset = dataset if way == "open_or_build" else CachedDataset("cache")
    return dataset, CachedLoader(dataset, batch_size, shuffle=True)

if __name__ == "__main__":
    way, photographs, size, batch_size, epochs, rate = sys.argv[1:]
    dataset, loader = make_loader(way, photographs, int(size), int(batch_size))
    built, ends, first = time.monotonic() - began, [], None
    for _ in range(int(epochs)):
        for _ in loader:
            first = first or time.monotonic() - began
            time.sleep(int(batch_size) / float(rate))
        ends.append(time.monotonic() - began)
    getattr(dataset, "digest", None)  # it waits for the end of the build
    whole = time.monotonic() - began
    print(json.dumps({"built": built, "first_batch": first, "first_epoch": ends[0], "all": whole}))
"""
_WAYS: Final = ("open_or_build", "build_cache", "DataLoader")


def turn(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of one way, in a new process and folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    words = [way, options.photographs, options.size, options.batch_size, options.epochs, options.device_rate]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "measured.py")
        script.write_text(_MEASURED)
        command = [sys.executable, str(script), *map(str, words)]
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def to_rows(found: dict[str, dict[str, float]], epochs: int) -> Rows:
    """Return the rows of the table, its heading first."""
    table = [["", "first batch, s", "first epoch, s", f"{epochs} epochs, s", "of build_cache's"]]
    for way, row in found.items():
        cells = (f"{row[name]:.1f}" for name in ("first_batch", "first_epoch", "all"))
        table.append([way, *cells, f"{row['all'] / found['build_cache']['all']:.2f}"])
    return table


def main() -> None:
    """Measure, and print seconds, the medians of the rounds."""
    options = _parse()
    turns = {way: functools.partial(turn, way, options) for way in _WAYS}
    race(turns, 1)
    runs = race(turns, options.rounds)
    found = {
        way: {name: statistics.median(run[name] for run in each) for name in each[0]} for way, each in runs.items()
    }
    figures: dict[str, Any] = {"seconds": found}
    built = found["build_cache"]["built"]
    notes = [f"warmup alone takes {built:.1f} s, imports included; medians of {options.rounds} rounds."]
    show(options, figures, [("", to_rows(found, options.epochs))], notes)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path, help="a folder with one folder for each class")
    parser.add_argument("--size", type=int, default=224, help="of the images, in pixels (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="images a batch (%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="that each way takes (%(default)s)")
    parser.add_argument("--device-rate", type=float, default=float("inf"), metavar="N", help="images/s of a device")
    add_race_options(parser)
    parser.set_defaults(rounds=3)
    options = parse_options(parser, {"epochs": 1})
    options.photographs = options.photographs.resolve()
    return options
