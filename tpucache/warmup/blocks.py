"""Divides samples into blocks, which become shards.

The division into blocks does not depend on the number of workers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.fields import Field, usual_bytes
from tpucache.warmup.sources.source import Listing, Sample, Source

# A small cache is divided, too, so that several workers write its shards at the same time.
_MIN_BLOCKS: Final = 8
MIN_BLOCK_SAMPLES: Final = 64
#: The most bytes that one task reads or writes: a second or two of work, so that a kill loses little.
TASK_BYTES: Final = 16 << 20
_LEAST_TASKS: Final = 64


@dataclass(frozen=True)
class Block:
    """Samples in the order of their numbers. Their records form one shard for each variant. A task gets a part of it.

    `variants` are the variants to build. `clean` maps the number of each sample whose clean record the cache has to the
    record's CRC-32.
    """

    number: int
    samples: tuple[Sample, ...]
    variants: tuple[int, ...]
    clean: Mapping[int, int] = field(default_factory=dict)

    def part(self, samples: Sequence[Sample]) -> Block:
        clean = {sample.number: self.clean[sample.number] for sample in samples if sample.number in self.clean}
        return dataclasses.replace(self, samples=tuple(samples), clean=clean)


def samples_a_task(block: Block, fields: Sequence[Field], samples: int) -> int:
    """Return how many samples of a block a task builds, in a build of `samples` samples that nobody reads meanwhile."""
    return max(1, min(TASK_BYTES // (usual_bytes(fields) * max(1, len(block.variants))), -(-samples // _LEAST_TASKS)))


def plan_blocks(samples: Sequence[Sample], fields: Sequence[Field], recipe: Recipe, first: int = 0) -> list[Block]:
    """Divide samples into blocks of equal size, give or take one sample, numbered from `first`."""
    if not samples:
        return []
    by_bytes = max(1, (recipe.shard_mb << 20) // usual_bytes(fields))
    by_count = max(MIN_BLOCK_SAMPLES, -(-len(samples) // _MIN_BLOCKS))
    count = -(-len(samples) // min(by_bytes, by_count))
    count = min(count, recipe.max_blocks or count)
    bounds = [len(samples) * number // count for number in range(count + 1)]
    variants = tuple(range(recipe.variants + 1))
    return [
        Block(first + number, tuple(samples[start:stop]), variants)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


def missing_blocks(cache: Cache, listing: Listing, recipe: Recipe, *, retry: bool = False) -> list[Block]:
    """Return the blocks to add to a finished cache: its own blocks with new variants, and blocks of new samples."""
    manifest = cache.manifest
    variants = tuple(variant for variant in range(recipe.variants + 1) if variant not in manifest.variants)
    blocks = _blocks_of(cache, listing, variants) if variants else []
    known = manifest.samples + len(manifest.skipped) + len(manifest.deleted)
    first = 1 + max((entry.block for entry in manifest.shards), default=-1)
    again = [listing.samples[skip.number] for skip in manifest.skipped] if retry else []
    return [*blocks, *plan_blocks([*again, *listing.samples[known:]], manifest.fields, recipe, first)]


def _blocks_of(cache: Cache, listing: Listing, variants: tuple[int, ...]) -> list[Block]:
    numbers = cache.samples.numbers.tolist()
    manifest, blocks = cache.manifest, []
    for entry in sorted(manifest.shards, key=lambda entry: entry.block):
        if entry.variant == manifest.variants[0]:
            some = numbers[entry.first : entry.first + entry.records]
            samples = tuple(listing.samples[number] for number in some)
            clean = {} if entry.variant else dict(zip(some, cache.index_of(entry)["crc32"].tolist(), strict=True))
            blocks.append(Block(entry.block, samples, variants, clean))
    return blocks


def listing_sha256(listing: Listing) -> str:
    """Return the hexadecimal SHA-256 of a listing: classes, columns, and numbers, paths and labels of samples."""
    digest = hashlib.sha256(json.dumps(listing.classes).encode())
    for sample in listing.samples:
        digest.update(json.dumps([sample.number, sample.path, sample.label]).encode())
    for name, column in listing.columns.items():
        digest.update(json.dumps([name, [str(value) for value in column]]).encode())
    return digest.hexdigest()


def content_sha256(source: Source, sample: Sample) -> str:
    """Return the hexadecimal SHA-256 of a sample's content and labels, or "" if the sample cannot be read."""
    try:
        item = source.load(sample)
    except SampleError:
        return ""
    return item.sha256(sample.label, item.label)
