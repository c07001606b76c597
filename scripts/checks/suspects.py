"""How many of the first suspects are wrong labels, where 5 % of the labels were made wrong on purpose.

It gives some photographs the label of another class, at random, trains a small model on all folds, ranks the samples
with `tpucache.insight.suspects`, and prints which share of the first 20, 50 and 100 are those photographs, and which
share of all. It ends in status 1 where, of a seed, less than half of the first 20 are (`--least`).

    python -m scripts.checks suspects PHOTOGRAPHS [--photos 3000] [--seeds 2]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from scripts.checks.leaks import accuracy, add_training, choose_photos, link, out_of_fold
from scripts.commands import say
from tpucache import Recipe, build_cache
from tpucache.insight import folds, read_predictions, suspects
from tpucache.warmup.relabel import set_columns

_FOLDS: Final = 5
_FIRST: Final = (20, 50, 100)


def main() -> int:
    """Print a line for each seed, as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of photographs, a folder a class")
    parser.add_argument("--photos", type=int, default=3000, help="photographs, at most (%(default)s)")
    parser.add_argument("--noise", type=float, default=0.05, help="share of wrong labels (%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="how often (%(default)s)")
    parser.add_argument("--least", type=float, default=0.5, help="of the first 20 (%(default)s)")
    add_training(parser)
    options = parser.parse_args()
    is_enough = True
    photos = choose_photos(options.folder, options.photos)
    say(
        f"{'seed':>4} {'accuracy':>8} {'wrong':>6}"
        + "".join(f"{f'first {first}':>10}" for first in _FIRST)
        + "    random"
    )
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as work:
            wrong = plant(options.folder, photos, Path(work, "photos"), options.noise, seed)
            cache = Path(work, "cache")
            build_cache(Path(work, "photos"), cache, Recipe(size=options.train_size))
            set_columns(cache, {"fold": folds(cache, _FOLDS, seed=seed)})
            run = out_of_fold(cache, Path(work, "run"), options, seed)
            table = read_predictions(run)
            ranked = suspects(table.probabilities, table.label_numbers())
            is_wrong = np.array([table.paths[at] in wrong for at in ranked.positions.tolist()])
            shares = "".join(f"{is_wrong[:first].mean():>10.2f}" for first in _FIRST)
            is_enough &= bool(is_wrong[: _FIRST[0]].mean() >= options.least)
            say(f"{seed:>4} {accuracy(run):>8.3f} {len(wrong):>6,}{shares}{is_wrong.mean():>10.2f}")
    return int(not is_enough)


def plant(folder: Path, photos: list[Path], target: Path, share: float, seed: int) -> set[str]:
    """Link photographs into folders of their classes, some of them of another class; return the paths of those."""
    rng = np.random.default_rng(seed)
    classes = sorted({path.relative_to(folder).parts[0] for path in photos})
    chosen = set(rng.choice(len(photos), round(share * len(photos)), replace=False).tolist())
    wrong = set()
    for number, path in enumerate(photos):
        name = path.relative_to(folder).parts[0]
        if number in chosen:
            name = str(rng.choice([other for other in classes if other != name]))
            wrong.add(f"{name}/{number}{path.suffix}")
        link(path, target / name / f"{number}{path.suffix}")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
