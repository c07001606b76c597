"""The receipt of a finished shard: written after the shard is in place, so that a rerun need not build it again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.store.files import write_atomically
from tpucache.store.manifest import ShardEntry
from tpucache.store.samples import encode_columns
from tpucache.warmup.work.chunks import ChunkInfo
from tpucache.warmup.work.folder import disk_failure

Rows = npt.NDArray[Any]

#: The array of a receipt that holds its JSON; interrupted builds of earlier versions have it under this name.
_METADATA: Final = "told"


@dataclass(frozen=True)
class BuiltShard:
    """A finished shard: its manifest entry (whose `first` is not known yet), its index rows, and its block's info."""

    entry: ShardEntry
    rows: Rows
    info: ChunkInfo


def save_receipt(work: Path, shard: BuiltShard) -> None:
    """Record durably that a shard is finished. Raises BuildError."""
    metadata = json.dumps({"entry": asdict(shard.entry), "note": shard.info.to_dict()})
    columns = {_METADATA: np.frombuffer(metadata.encode(), np.uint8), "rows": shard.rows}
    path = _path(work, shard.entry.block, shard.entry.variant)
    try:
        write_atomically(path, encode_columns(columns))
    except OSError as error:
        raise disk_failure(path, error) from error


def load_receipt(cache: Path, work: Path, block: int, variant: int) -> BuiltShard | None:
    """Return a finished shard, or None when it has to be built: no receipt, or no such shard."""
    try:
        with np.load(_path(work, block, variant), allow_pickle=False) as archive:
            metadata = json.loads(archive[_METADATA].tobytes())
            entry = ShardEntry(**metadata["entry"])
            if (cache / entry.name).stat().st_size != entry.bytes:
                return None
            return BuiltShard(entry, archive["rows"], ChunkInfo.from_dict(metadata["note"]))
    except FileNotFoundError:
        return None


def _path(work: Path, block: int, variant: int) -> Path:
    return work / f"shard-{block:05d}-v{variant:04d}.npz"
