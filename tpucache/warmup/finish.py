"""Blocks -> cache: the index, the samples table and, last of all, the manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import features

import tpucache
from tpucache.errors import SourceError
from tpucache.recipe import Recipe, fingerprint
from tpucache.store.files import write_atomically
from tpucache.store.format import INDEX_DTYPE, INDEX_NAME, MANIFEST_NAME, SAMPLES_NAME
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry, Statistics, cache_fingerprint
from tpucache.store.samples import Column, Strings, encode_columns
from tpucache.warmup.build import WORK_NAME, image_field
from tpucache.warmup.receipt import BuiltBlock
from tpucache.warmup.sources.base import Listing

_LIBRARIES: Final = ("numpy", "pillow", "lmdb", "joblib", "albumentations")

Rows = npt.NDArray[Any]


def finish_cache(cache: Path, plan: Mapping[str, Any], listing: Listing, blocks: Sequence[BuiltBlock]) -> Manifest:
    """Write what makes finished blocks a cache, the manifest last. Raises SourceError when no sample was usable."""
    skipped = tuple(skip for block in blocks for skip in block.skipped)
    numbers = np.concatenate([block.sample_numbers for block in blocks])
    if not len(numbers):
        raise SourceError(f"none of the {len(skipped)} samples could be used; {skipped[0].path!r}: {skipped[0].reason}")
    samples = [listing.samples[number] for number in numbers.tolist()]
    columns: dict[str, Column] = {"number": numbers, "path": Strings.pack([s.path for s in samples])}
    counts: tuple[int, ...] = ()
    if listing.classes:
        labels = np.array([sample.label for sample in samples], np.min_scalar_type(len(listing.classes)))
        columns["label"] = labels
        counts = tuple(np.bincount(labels, minlength=len(listing.classes)).tolist())
    shards, index = _join(blocks)
    recipe = plan["recipe"]
    manifest = Manifest(
        samples=len(numbers),
        variants=tuple(range(recipe["variants"] + 1)),
        fields=(image_field(Recipe.from_dict(recipe)),),
        classes=listing.classes,
        shards=shards,
        tables=(
            _write_table(cache, INDEX_NAME, _encode_index(index)),
            _write_table(cache, SAMPLES_NAME, encode_columns(columns)),
        ),
        skipped=skipped,
        statistics=_statistics(blocks, len(numbers) * recipe["size"][0] * recipe["size"][1], counts),
        fingerprint=cache_fingerprint(fingerprint(recipe), shards),
        recipe=recipe,
        source=plan["source"],
        created_by=_versions(),
    )
    manifest.save(cache, cache / WORK_NAME / f"{MANIFEST_NAME}.tmp")
    return manifest


def _join(blocks: Sequence[BuiltBlock]) -> tuple[tuple[ShardEntry, ...], Rows]:
    """Return the shards, variant by variant, with their first samples, and the index over them."""
    shards: list[ShardEntry] = []
    runs: list[Rows] = []
    for variant in range(len(blocks[0].shards)):
        first = 0
        for block in blocks:
            rows = block.rows[variant].copy()
            rows["shard"] = len(shards)
            runs.append(rows)
            shards.append(dataclasses.replace(block.shards[variant], first=first))
            first += len(rows)
    return tuple(shards), np.concatenate(runs).astype(INDEX_DTYPE)


def _encode_index(index: Rows) -> bytes:
    target = io.BytesIO()
    np.save(target, index, allow_pickle=False)
    return target.getvalue()


def _write_table(cache: Path, name: str, data: bytes) -> FileEntry:
    write_atomically(cache / name, data, cache / WORK_NAME / f"{name}.tmp")
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())


def _statistics(blocks: Sequence[BuiltBlock], pixels: int, counts: tuple[int, ...]) -> Statistics:
    """Return the channels' mean and standard deviation from exact sums, so that no order of blocks shows in them."""
    sums = [sum(values) for values in zip(*(block.sums for block in blocks), strict=True)]
    squares = [sum(values) for values in zip(*(block.squares for block in blocks), strict=True)]
    variances = [(square * pixels - total * total) / pixels**2 for total, square in zip(sums, squares, strict=True)]
    return Statistics(
        mean=tuple(total / pixels for total in sums),
        std=tuple(variance**0.5 for variance in variances),
        class_counts=counts,
    )


def _versions() -> dict[str, str]:
    """Return the versions that decide the records' bytes."""
    return {
        "tpucache": tpucache.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
        "libjpeg": str(features.version("libjpeg_turbo") or features.version("jpg")),
    }
