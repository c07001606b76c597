"""The receipt of a finished block: written after its shards are in place, so that a rerun need not build them again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.errors import BuildError
from tpucache.store.files import write_atomically
from tpucache.store.manifest import ShardEntry, Skipped
from tpucache.store.samples import Column, encode_columns

Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class BuiltBlock:
    """What a finished block adds to the cache.

    `shards` and `rows` have one item a variant; neither knows yet how many samples and shards come before it.
    `sums` and `squares` are exact, over the channels of the clean images.
    """

    number: int
    shards: tuple[ShardEntry, ...]
    rows: tuple[Rows, ...]
    sample_numbers: npt.NDArray[np.uint64]
    skipped: tuple[Skipped, ...]
    sums: tuple[int, ...]
    squares: tuple[int, ...]


def save_receipt(work: Path, block: BuiltBlock) -> None:
    """Record durably that a block stands. Raises BuildError."""
    told = {
        "shards": [asdict(entry) for entry in block.shards],
        "skipped": [asdict(skipped) for skipped in block.skipped],
        "sums": block.sums,
        "squares": block.squares,
    }
    columns: dict[str, Column] = {
        "told": np.frombuffer(json.dumps(told).encode(), np.uint8),
        "sample_numbers": block.sample_numbers,
        **{f"rows{variant}": rows for variant, rows in enumerate(block.rows)},
    }
    try:
        write_atomically(_path(work, block.number), encode_columns(columns))
    except OSError as error:
        raise BuildError(f"{work}: block {block.number} cannot be recorded: {error}") from error


def load_receipt(work: Path, number: int) -> BuiltBlock | None:
    """Return a block that stands, or None when it has to be built: no receipt, or not all of its shards."""
    try:
        with np.load(_path(work, number), allow_pickle=False) as archive:
            told = json.loads(archive["told"].tobytes())
            shards = tuple(ShardEntry(**entry) for entry in told["shards"])
            if any((work.parent / entry.name).stat().st_size != entry.bytes for entry in shards):
                return None
            return BuiltBlock(
                number=number,
                shards=shards,
                rows=tuple(archive[f"rows{variant}"] for variant in range(len(shards))),
                sample_numbers=archive["sample_numbers"],
                skipped=tuple(Skipped(**skipped) for skipped in told["skipped"]),
                sums=tuple(told["sums"]),
                squares=tuple(told["squares"]),
            )
    except FileNotFoundError:
        return None


def _path(work: Path, number: int) -> Path:
    return work / f"block-{number:05d}.npz"
