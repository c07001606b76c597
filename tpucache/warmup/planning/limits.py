"""What a cache must fit into: the disk, and with `--target kaggle` what Kaggle keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tpucache import kaggle
from tpucache.errors import BuildError
from tpucache.warmup.planning.estimate import Estimate

_MEGABYTE: Final = 1e6


def check_room(expected: Estimate, cache: Path, advice: str) -> None:
    """Raise BuildError with this advice when the disk does not hold what is to be written, working space included."""
    needed = expected.bytes + expected.spooled
    if needed > expected.free:
        raise BuildError(
            f"{cache} needs about {expected.bytes / _MEGABYTE:,.1f} MB more and {expected.spooled / _MEGABYTE:,.1f} MB "
            f"to work in, and {expected.free / _MEGABYTE:,.1f} MB are free: {advice}"
        )


def kaggle_blocks(variants: int) -> int:
    """Return how many blocks a cache of so many variants may have, to stay within Kaggle's files. Raises BuildError."""
    blocks = kaggle.TARGET_SHARDS // (variants + 1)
    if not blocks:
        raise BuildError(
            f"{variants} variants and the clean one make more than {kaggle.TARGET_SHARDS} shards: use at most "
            f"{kaggle.TARGET_SHARDS - 1} --variants with --target kaggle"
        )
    return blocks


def check_kaggle_files(shards: int) -> None:
    """Raise BuildError when a cache of so many shards is not one that Kaggle publishes file by file."""
    if shards > kaggle.TARGET_SHARDS:
        raise BuildError(
            f"the cache has or would have {shards} shards, more than the {kaggle.TARGET_SHARDS} of --target kaggle: a "
            "larger --shard-mb makes fewer, in another folder where it is finished"
        )


def check_kaggle_bytes(expected: Estimate, cache: Path) -> None:
    """Raise BuildError when a cache, with what is still to be done, is larger than what Kaggle keeps."""
    total = expected.bytes + sum(path.stat().st_size for path in cache.glob("*.lmdb"))
    if total > kaggle.WORKING_BYTES:
        raise BuildError(
            f"the cache would take about {total / 1e9:,.1f} GB, and /kaggle/working keeps "
            f"{kaggle.WORKING_BYTES / 1e9:.0f}: use --codec jpeg, a smaller --size or fewer --variants"
        )
