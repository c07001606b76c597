"""How long it takes to open a cache of 200 versions, compared with one of one version.

    python -m scripts.bench versions
    python -m scripts.bench versions --images 400 --versions 20 --rounds 3

Half of the versions are made by deleting a sample, and half by another column.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.rounds import race, ratio
from scripts.bench.table import add_race_options, parse_options, show
from tpucache import CachedDataset, Recipe, build_cache
from tpucache.warmup import delete_samples, set_columns

_OPENINGS = 20  # a turn
_SIDE = 32


class Noise:
    """Images of noise, in classes by turns."""

    def __init__(self, images: int) -> None:
        self._images = images

    def __len__(self) -> int:
        return self._images

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return np.random.default_rng(number).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8), number % 10


def open_seconds(cache: Path) -> float:
    """Return how long it takes to open a cache repeatedly, and to read a sample."""
    began = time.perf_counter()
    for _ in range(_OPENINGS):
        with CachedDataset(cache) as dataset:
            dataset[0]
    return time.perf_counter() - began


def add_versions(cache: Path, number: int) -> None:
    """Give a cache this many versions."""
    for version in range(number - 1):
        if version % 2:
            delete_samples(cache, paths=CachedDataset(cache).paths[:1])
        else:
            set_columns(cache, {"round": np.full(len(CachedDataset(cache)), version)})


def main() -> None:
    """Measure as the command line asks, and print the ratio."""
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="tpucache-versions-") as folder:
        one = Path(folder, "one")
        build_cache(Noise(options.images), one, Recipe(size=_SIDE))
        many = Path(shutil.copytree(one, Path(folder, "many")))
        add_versions(many, options.versions)
        found = race({each.name: functools.partial(open_seconds, each) for each in (one, many)}, options.rounds)
    share = ratio(found["many"], found["one"])
    note = f"opening one of {options.versions} versions takes {share:.2f} times as long as opening one of one."
    show(options, {"opening": share}, [], [note])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000, help="in the cache (%(default)s)")
    parser.add_argument("--versions", type=int, default=200, help="how many one cache gets (%(default)s)")
    add_race_options(parser)
    return parse_options(parser, {"versions": 2})
