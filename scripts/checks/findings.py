"""The page of findings of 100,000 pictures: how large it is, and how soon a browser has opened it.

It makes a cache of random pictures, of which every second one is that before it, and a table of predictions such as a
run of all folds writes, writes the page of both and opens it in a browser. It ends in status 1 for a page of more than
30 MB, or one whose first cards take more than two seconds. A page takes 28 MB at most, which 8,000 pictures fill.

    python -m scripts.checks findings [--samples 100000] [--folder build/findings]
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.browser import open_browser
from scripts.commands import say
from tpucache import CachedDataset, Recipe, build_cache, report_findings

_LARGEST: Final = 30_000_000  # bytes
_SLOWEST: Final = 2.0  # seconds
_SIDE: Final = 128
_PATCH: Final = 4  # pixels of one colour: photographs compress better
_COPIED: Final = 2
_ROUNDS: Final = 5


class Pictures:
    """Random pictures in two classes, of which every second one is that before it."""

    classes = ("even", "odd")

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> tuple[np.ndarray[Any, Any], int]:
        seed = number if number % _COPIED else max(0, number - 1)
        colours = np.random.default_rng(seed).integers(0, 256, (_SIDE // _PATCH, _SIDE // _PATCH, 3), np.uint8)
        return colours.repeat(_PATCH, 0).repeat(_PATCH, 1), number % 3 % 2


def main() -> int:
    """Make the page and open it, as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000, help="pictures (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("build/findings"), help="where to write (%(default)s)")
    options = parser.parse_args()
    cache, path = options.folder / f"cache-{options.samples}", options.folder / "findings.html"
    start = time.perf_counter()
    build_cache(Pictures(options.samples), cache, Recipe(size=_SIDE, codec="jpeg"))
    say(f"{cache}: {options.samples:,} pictures in {time.perf_counter() - start:.0f} s")
    table = write_predictions(cache, options.folder / "out_of_fold.csv")
    start = time.perf_counter()
    report_findings(cache, predictions=table).save(path)
    size = path.stat().st_size
    say(f"{path}: {size / 1e6:.1f} MB, at most {_LARGEST / 1e6:.0f}, in {time.perf_counter() - start:.0f} s")
    seconds = sorted(opening_seconds(path))
    median = seconds[_ROUNDS // 2]
    say(f"first cards after {seconds[0]:.2f} to {seconds[-1]:.2f} s, median {median:.2f}, at most {_SLOWEST}")
    return int(size > _LARGEST or median > _SLOWEST)


def write_predictions(cache: Path, path: Path) -> Path:
    """Write a table of random predictions of a cache's samples, as a run of all folds does."""
    dataset = CachedDataset(cache)
    classes = dataset.manifest.classes
    odds = np.random.default_rng(0).random(len(dataset)).tolist()
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["sample", "path", "label", "prediction", *classes])
        for number, (name, label, odd) in enumerate(zip(dataset.paths, dataset.labels.tolist(), odds, strict=True)):
            table.writerow([number, name, classes[label], classes[odd < 0.5], f"{odd:.6f}", f"{1 - odd:.6f}"])
    return path


def opening_seconds(path: Path) -> list[float]:
    """Return how long a browser takes in each of five rounds until it has painted the first cards of a page."""
    found = []
    with open_browser() as browser:
        for _ in range(_ROUNDS):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            start = time.perf_counter()
            page.goto(path.absolute().as_uri(), wait_until="commit")
            page.wait_for_selector(".card")
            page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
            found.append(time.perf_counter() - start)
            page.close()
    return found


if __name__ == "__main__":
    raise SystemExit(main())
