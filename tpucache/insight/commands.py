"""The commands `compare` and `suspects`, and the folds of `relabel --make-folds`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpucache.cli.parser import Report, cache_or_url, command, local_path, natural, note, positive, show, value
from tpucache.errors import UsageError

if TYPE_CHECKING:
    from tpucache.insight.copies import Comparison, Exact, Pairs
    from tpucache.store.cache import Cache
    from tpucache.store.hashes import Hashes
    from tpucache.store.manifest import Manifest

_DUPLICATES: Final = "duplicates"
_SHOWN: Final = 20


@command(
    "cache/train cache/test",
    value(
        "caches",
        "CACHE",
        "folders of caches that warmup built, kaggle:slug for mounted caches, or URLs of caches",
        cache_or_url,
        nargs="+",
    ),
    value(
        "--threshold",
        "BITS",
        "pictures whose hashes differ in at most this many of 256 bits look alike",
        natural,
        48,
    ),
)
def compare(options: argparse.Namespace) -> int:
    """Find pictures that are in several caches.

    The exit status is 1 if two of the caches have a picture in common, or pictures that look alike.
    """
    from tpucache.insight.copies import compare as compare_two
    from tpucache.loading.find import open_cache

    if len(options.caches) < 2:
        raise UsageError("give two caches or more to compare")
    caches = [open_cache(each) for each in options.caches]
    comparisons, has_copies = [], False
    for (one, first), (two, second) in combinations([(each, _hashes(each)) for each in caches], 2):
        found = compare_two(one, two, options.threshold, hashed=(first, second))
        comparisons.append(_comparison_dict(one, two, found))
        has_copies |= found.has_copies
    report = {
        "caches": [{"place": each.place, "samples": each.manifest.samples} for each in caches],
        "threshold": options.threshold,
        "found": has_copies,
        "comparisons": comparisons,
    }
    show(options, report, [line for each in comparisons for line in _comparison_lines(each)])
    return int(has_copies)


def _hashes(cache: Cache) -> Hashes:
    from tpucache.insight.hashing import hashes
    from tpucache.progress import Progress

    with Progress(cache.manifest.samples, "hash", "images") as progress:
        return hashes(cache, on_progress=lambda done, _: progress.advance_to(done))


def _sample(cache: Cache, position: int) -> dict[str, Any]:
    """A label that is a class is given by its name."""
    labels, classes = cache.samples.labels, cache.manifest.classes
    label: Any = None
    if labels is not None:
        label = labels[position].tolist()
        if labels.ndim == 1 and classes:
            label = classes[label] if label >= 0 else None
        elif classes and len(classes) == len(label):
            label = [name for name, mark in zip(classes, label, strict=True) if mark > 0]
    return {"number": int(cache.samples.numbers[position]), "path": cache.samples.paths[position], "label": label}


def _samples(one: Cache, two: Cache, ends: Exact | Pairs) -> list[dict[str, Any]]:
    both = zip(ends.first.tolist(), ends.second.tolist(), strict=True)
    return [{"first": _sample(one, first), "second": _sample(two, second)} for first, second in both]


def _comparison_dict(one: Cache, two: Cache, found: Comparison) -> dict[str, Any]:
    exact, near = found.exact, found.near
    pairs = zip(
        _samples(one, two, near), near.distance.tolist(), near.is_mirrored.tolist(), found.is_copy.tolist(), strict=True
    )
    return {
        "first": one.place,
        "second": two.place,
        "exact": {
            "compared": not exact.reason,
            "reason": exact.reason,
            "count": len(exact),
            "pairs": _samples(one, two, exact),
        },
        "near": {
            "threshold": near.threshold,
            "blank": near.blank,
            "count": len(near),
            "copies": int(found.is_copy.sum()),
            "pairs": [
                {**pair, "distance": distance, "mirrored": is_mirrored, "copy": is_copy}
                for pair, distance, is_mirrored, is_copy in pairs
            ],
        },
    }


def _search_text(threshold: int, blank: int) -> str:
    text = f"at most {threshold} of 256 bits apart, all images compared"
    return f"{text}; {blank:,} blank images left out" if blank else text


def _comparison_lines(found: dict[str, Any]) -> list[str]:
    """Return the result of `_comparison_dict` as lines of text."""
    exact, near = found["exact"], found["near"]
    search = _search_text(near["threshold"], near["blank"])
    equal = f"{exact['count']:,}" if exact["compared"] else f"not compared: {exact['reason']}"
    return [
        f"{found['first']} and {found['second']}",
        f"  equal records  {equal}",
        *_pair_lines(exact["pairs"]),
        f"  look alike     {near['count']:,} ({search}), of which {near['copies']:,} are copies by details",
        *_pair_lines(near["pairs"]),
    ]


def _pair_lines(pairs: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for pair in pairs[:_SHOWN]:
        one, two = pair["first"], pair["second"]
        line = f"    {one['path']!r} and {two['path']!r}"
        if "distance" in pair:
            mirrored, copies = ", mirrored" if pair["mirrored"] else "", ", copies" if pair["copy"] else ""
            line += f", {pair['distance']} bits{mirrored}{copies}"
        if None not in (one["label"], two["label"]) and one["label"] != two["label"]:
            line += f", labels {one['label']!r} and {two['label']!r}"
        lines.append(line)
    more = len(pairs) - _SHOWN
    return [*lines, f"    … and {more:,} more (--json has all)"] if more > 0 else lines


def make_folds(options: argparse.Namespace) -> tuple[Manifest, dict[str, Any], list[str]]:
    """Write the column `fold` of a cache; return its manifest, and the result as JSON values and as lines."""
    from tpucache.insight.copies import confirm_copies, groups, pairs
    from tpucache.insight.splitting import column_groups, folds
    from tpucache.store.cache import Cache
    from tpucache.warmup.relabel import set_columns

    cache = Cache.open(options.cache)
    members = np.arange(cache.manifest.samples)
    search, lines = {}, []
    if options.groups == _DUPLICATES:
        found = pairs(_hashes(cache))
        members, search = groups(found), {"threshold": found.threshold, "blank": found.blank}
        copies, text = int(confirm_copies(found, cache).sum()), _search_text(**search)
        lines.append(f"  look alike: {len(found):,} pairs {text}; {copies:,} of them are copies by details")
    elif options.groups is not None:
        members = column_groups(cache, options.groups)
    stratify = None if options.stratify == "none" else options.stratify
    fold = folds(cache, options.make_folds, members, stratify, seed=options.seed)
    manifest = set_columns(options.cache, {"fold": fold})
    sizes = np.bincount(fold, minlength=options.make_folds).tolist()
    counts = np.unique(members, return_counts=True)[1]
    several = int((counts > 1).sum())
    report = {"folds": {"sizes": sizes, "groups": several, "largest_group": int(counts.max()), **search}}
    lines.insert(0, f"  folds: {', '.join(f'{size:,}' for size in sizes)} samples")
    if options.groups is not None:
        lines.append(f"  groups: {several:,} of more than one sample, none divided")
    return manifest, report, lines


@command(
    "runs/folds --top 50 -o suspects.csv",
    value(
        "run",
        "RUN|TABLE",
        "the folder of a run of all folds, or a .csv with predictions for samples that the model has not seen",
        local_path,
    ),
    value("--top", "N", "samples to list, at most", positive, 50),
    value("-o, --output", "FILE", "also write the samples to a .csv, for corrections", local_path),
)
def suspects(options: argparse.Namespace) -> Report:
    """List the samples whose labels are least probable to models that have not seen them. Some labels may be right."""
    from tpucache.insight.labels import read_predictions, suspects_table
    from tpucache.insight.labels import suspects as rank
    from tpucache.report.page import write_file

    table = read_predictions(options.run)
    found = rank(table.probabilities, table.label_numbers())
    rows = [
        {
            "sample": int(table.numbers[at]),
            "path": table.paths[at],
            "label": table.labels[at],
            "predicted": table.predictions[at],
            "score": round(score, 6),
        }
        for at, score in zip(found.positions[: options.top].tolist(), found.scores.tolist(), strict=False)
    ]
    if options.output is not None:
        write_file(options.output, suspects_table(row.values() for row in rows))
        note(f"{options.output}: correct the labels in this file, then `tpucache relabel CACHE {options.output}`")
    lines = [
        f"{row['score']:.3f}  {row['path']!r}: label {row['label']!r}, predicted {row['predicted']!r}" for row in rows
    ]
    return {"ranked": len(found), "suspects": rows}, lines or ["no sample has a label"]
