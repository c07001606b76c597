"""What `compare` finds of planted leaks, and what copies of pictures do to the scores of folds.

The first part divides photographs into two caches, puts copies of some of the first into the second (the same file, and
edited ones), and prints for each kind which share `compare` finds, and how many other pairs it reports. It ends in
status 1 where an equal file is not found, or fewer than 0.9 of the edited copies.

The second part, with `--seeds`, adds edited copies of some photographs to a cache, of their own class, and trains a
small model on all folds: with folds at random, and with folds that keep copies together.

    python -m scripts.checks leaks PHOTOGRAPHS [--photos 1200] [--seeds 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageOps

from scripts.checks.copies import EDITS
from scripts.commands import say
from tpucache import CachedDataset, Recipe, build_cache
from tpucache.insight import compare, folds, groups, hashes, pairs, read_predictions
from tpucache.training import RunOptions, TrainSettings, open_all_folds, open_device, train_folds
from tpucache.warmup.relabel import set_columns

#: The edits that `compare` is to find.
FOUND: Final = ("jpeg 15", "half", "brighter", "mirrored", "mark")
_SHARE: Final = 0.9
_FOLDS: Final = 5
_COPIED: Final = 0.3  # of the photographs have a copy in the second part


def main() -> int:
    """Run both parts, as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of photographs, a folder a class")
    parser.add_argument("--photos", type=int, default=1200, help="photographs, at most (%(default)s)")
    parser.add_argument("--seeds", type=int, default=0, help="seeds of the second part (%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="pixels of the first part (%(default)s)")
    add_training(parser)
    options = parser.parse_args()
    photos = choose_photos(options.folder, options.photos)
    with tempfile.TemporaryDirectory() as work:
        is_found = compare_planted(options.folder, photos, Path(work), options.size)
        if options.seeds:
            score_folds(options, photos, Path(work))
    return int(not is_found)


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of what is trained."""
    parser.add_argument("--model", default="cnn", help="what is trained (%(default)s)")
    parser.add_argument("--epochs", type=int, default=12, help="of each fold (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="%(default)s")
    parser.add_argument("--train-size", type=int, default=32, help="pixels of what is trained on (%(default)s)")


def choose_photos(folder: Path, most: int) -> list[Path]:
    """Return photographs below a folder, evenly spread over it."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    return [found[at] for at in np.linspace(0, len(found) - 1, min(most, len(found))).astype(int).tolist()]


def opened(path: Path) -> Image.Image:
    """Return a photograph as it is displayed."""
    return ImageOps.exif_transpose(Image.open(path)).convert("RGB")


def compare_planted(folder: Path, photos: Sequence[Path], work: Path, size: int) -> bool:
    """Print what `compare` finds of planted copies; return whether it is enough."""
    first, second = photos[0::2], photos[1::2]
    kinds = ("equal", *FOUND)
    planted: dict[str, tuple[str, str]] = {}  # name in the second cache -> name in the first, kind
    for name, chosen in (("first", first), ("second", second)):
        for path in chosen:
            link(path, work / name / path.relative_to(folder))
    for number, path in enumerate(first[:: max(1, len(first) // (len(kinds) * 100))]):
        kind, original = kinds[number % len(kinds)], path.relative_to(folder)
        target = work / "second" / original.with_name(f"planted-{number}{path.suffix if kind == 'equal' else '.png'}")
        if kind == "equal":
            link(path, target)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            EDITS[kind](opened(path)).save(target)
        planted[target.relative_to(work / "second").as_posix()] = (original.as_posix(), kind)
    for name in ("first", "second"):
        build_cache(work / name, work / f"{name}.cache", Recipe(size=size))
    one, two = (CachedDataset(work / f"{name}.cache") for name in ("first", "second"))
    found = compare(one, two)
    exact = {(two.paths[b], one.paths[a]) for a, b in zip(found.exact.first, found.exact.second, strict=True)}
    near = {(two.paths[b], one.paths[a]) for a, b in zip(found.near.first, found.near.second, strict=True)}
    say(f"{len(one):,} and {len(two):,} pictures, of which {len(planted):,} of the second are copies of the first")
    near_found, near_planted, is_enough = 0, 0, True
    for kind in kinds:
        wanted = {(copy, name) for copy, (name, of) in planted.items() if of == kind}
        got = len(wanted & (exact if kind == "equal" else exact | near))
        if kind == "equal":
            is_enough = got == len(wanted)
        else:
            near_found, near_planted = near_found + got, near_planted + len(wanted)
        say(f"{kind:12} {len(wanted):4} planted, {got / max(1, len(wanted)):.2f} found")
    say(f"{'all edits':12} {near_planted:4} planted, {near_found / max(1, near_planted):.2f} found")
    others = (exact | near) - {(copy, name) for copy, (name, _) in planted.items()}
    say(f"{len(others):,} other pairs{''.join(f' {pair}' for pair in sorted(others)[:10])}")
    return is_enough and near_found >= _SHARE * near_planted


def link(path: Path, target: Path) -> None:
    """Make another name of a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(path.absolute())


def score_folds(options: argparse.Namespace, photos: Sequence[Path], work: Path) -> None:
    """Print the accuracy out of fold, of folds at random and of folds that keep copies together."""
    source = work / "copied"
    for number, path in enumerate(photos):
        original = path.relative_to(options.folder)
        link(path, source / original)
        link(path, work / "plain" / original)
        if number % 10 < 10 * _COPIED:
            kind = FOUND[number // 10 % len(FOUND)]
            EDITS[kind](opened(path)).save(source / original.with_name(f"{original.stem}-{kind}.png".replace(" ", "-")))
    caches = {name: work / f"{name}.small" for name in ("plain", "copied")}
    for name, cache in caches.items():
        build_cache(work / name, cache, Recipe(size=options.train_size))
    members = groups(pairs(hashes(caches["copied"])))
    say(f"{len(photos):,} photographs and {len(members) - len(photos):,} copies, {len(set(members.tolist())):,} groups")
    ways = {"no copies": ("plain", None), "at random": ("copied", None), "grouped": ("copied", members)}
    scores: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(options.seeds):
        for way, (name, together) in ways.items():
            set_columns(caches[name], {"fold": folds(caches[name], _FOLDS, together, seed=seed)})
            run = out_of_fold(caches[name], work / f"run-{way}-{seed}", options, seed)
            scores[way].append(accuracy(run))
            say(f"seed {seed}, {way}: {scores[way][-1]:.3f}")
    for way, each in scores.items():
        say(f"{way:10} {statistics.mean(each):.3f} ({', '.join(f'{score:.3f}' for score in each)})")


def out_of_fold(cache: Path, run: Path, options: argparse.Namespace, seed: int) -> Path:
    """Train all folds of a cache, and return the run, which has what each predicts of its own."""
    data = CachedDataset(cache, in_memory=True)
    settings = TrainSettings(model=options.model, epochs=options.epochs, batch_size=options.batch_size, seed=seed)
    run_options = RunOptions(replay=False, curves=False)
    device = open_device("torch", device="cpu")
    train_folds(open_all_folds(run, data, data, resume=False), settings, device, run_options)
    return run


def accuracy(run: Path) -> float:
    """Return the share of right predictions out of fold."""
    found = read_predictions(run)
    return float(np.mean([one == other for one, other in zip(found.labels, found.predictions, strict=True)]))


if __name__ == "__main__":
    raise SystemExit(main())
