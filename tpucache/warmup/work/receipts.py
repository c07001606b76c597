"""The receipt of a sealed shard: written after the shard is in place, so that a rerun need not build it again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tpucache.store.files.atomic import write_atomically
from tpucache.store.manifest import ShardEntry
from tpucache.store.samples import encode_columns
from tpucache.warmup.work.chunks import Note
from tpucache.warmup.work.folder import disk_failure

Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class SealedShard:
    """A shard that stands: its entry (which does not know yet how many samples come before it), its index rows, and
    the note of its whole block."""

    entry: ShardEntry
    rows: Rows
    note: Note


def save_receipt(work: Path, shard: SealedShard) -> None:
    """Record durably that a shard stands. Raises BuildError."""
    told = json.dumps({"entry": asdict(shard.entry), "note": shard.note.to_dict()})
    columns = {"told": np.frombuffer(told.encode(), np.uint8), "rows": shard.rows}
    path = _path(work, shard.entry.block, shard.entry.variant)
    try:
        write_atomically(path, encode_columns(columns))
    except OSError as error:
        raise disk_failure(path, error) from error


def load_receipt(cache: Path, work: Path, block: int, variant: int) -> SealedShard | None:
    """Return a shard that stands, or None when it has to be built: no receipt, or no such shard."""
    try:
        with np.load(_path(work, block, variant), allow_pickle=False) as archive:
            told = json.loads(archive["told"].tobytes())
            entry = ShardEntry(**told["entry"])
            if (cache / entry.name).stat().st_size != entry.bytes:
                return None
            return SealedShard(entry, archive["rows"], Note.from_dict(told["note"]))
    except FileNotFoundError:
        return None


def _path(work: Path, block: int, variant: int) -> Path:
    return work / f"shard-{block:05d}-v{variant:04d}.npz"
