"""Samples -> blocks. The layout follows from the samples and the recipe alone, never from the number of workers."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tpucache.recipe import Recipe
from tpucache.warmup.sources.base import Listing, Sample

# Bytes of an encoded photograph over its raw bytes, near enough to size shards by.
_CODEC_RATIO: Final = {"raw": 1.0, "jpeg": 0.25, "png": 0.65, "zstd": 0.85}
# A cache below the shard size is still cut, so that several workers have work.
_MIN_BLOCKS: Final = 8
_MIN_BLOCK_SAMPLES: Final = 64


@dataclass(frozen=True)
class Block:
    """Consecutive samples that are decoded by one task and share one shard a variant."""

    number: int
    samples: tuple[Sample, ...]


def record_bytes(recipe: Recipe) -> int:
    """Return the bytes a record will have: exact for raw, typical for the other codecs."""
    return max(1, round(recipe.height * recipe.width * 3 * _CODEC_RATIO[recipe.codec]))


def plan_blocks(samples: Sequence[Sample], recipe: Recipe) -> list[Block]:
    """Cut samples into blocks that differ by at most one sample and make shards of at most about `shard_mb`."""
    by_bytes = max(1, (recipe.shard_mb << 20) // record_bytes(recipe))
    by_count = max(_MIN_BLOCK_SAMPLES, -(-len(samples) // _MIN_BLOCKS))
    count = -(-len(samples) // min(by_bytes, by_count))
    bounds = [len(samples) * number // count for number in range(count + 1)] if count else [0]
    return [
        Block(number, tuple(samples[start:stop])) for number, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


def listing_sha256(listing: Listing) -> str:
    """Return a hash of a source's samples in order: their numbers, paths, labels and classes."""
    digest = hashlib.sha256(json.dumps(listing.classes).encode())
    for sample in listing.samples:
        digest.update(json.dumps([sample.number, sample.path, sample.label]).encode())
    return digest.hexdigest()
