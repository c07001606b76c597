"""Samples -> blocks -> chunks. Blocks depend on samples and recipe alone, never on the number of workers."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.codecs import CODECS
from tpucache.store.fields import Field
from tpucache.warmup.sources.base import Listing, Sample

# A cache below the shard size is still cut, so that several workers seal at its end.
_MIN_BLOCKS: Final = 8
MIN_BLOCK_SAMPLES: Final = 64
# What one task makes or reads at most: a second or two of work, little to lose by a kill.
_CHUNK_BYTES: Final = 16 << 20
MIN_CHUNKS: Final = 64


@dataclass(frozen=True)
class Block:
    """Consecutive samples that share one shard a variant; `variants` are those to be built.

    `clean` has the CRC-32 of the clean record by sample number, where a cache has it already.
    """

    number: int
    samples: tuple[Sample, ...]
    variants: tuple[int, ...]
    clean: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """Consecutive samples of a block that one task decodes, once for all variants; `clean` is as of a block."""

    block: int
    number: int
    samples: tuple[Sample, ...]
    variants: tuple[int, ...]
    clean: Mapping[int, int] = field(default_factory=dict)


def record_bytes(fields: Sequence[Field]) -> int:
    """Return the bytes a record will have: exact for raw fields, typical for the other codecs."""
    return max(1, round(sum(field.nbytes * CODECS[field.codec].typical_ratio for field in fields)))


def plan_blocks(samples: Sequence[Sample], fields: Sequence[Field], recipe: Recipe, first: int = 0) -> list[Block]:
    """Cut samples into blocks, numbered from `first`, that differ by at most one sample.

    Their shards have at most about `shard_mb`, unless the recipe wants fewer blocks than that makes.
    """
    if not samples:
        return []
    by_bytes = max(1, (recipe.shard_mb << 20) // record_bytes(fields))
    by_count = max(MIN_BLOCK_SAMPLES, -(-len(samples) // _MIN_BLOCKS))
    count = -(-len(samples) // min(by_bytes, by_count))
    count = min(count, recipe.max_blocks or count)
    bounds = [len(samples) * number // count for number in range(count + 1)]
    variants = tuple(range(recipe.variants + 1))
    return [
        Block(first + number, tuple(samples[start:stop]), variants)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


def missing_blocks(cache: Cache, listing: Listing, recipe: Recipe) -> list[Block]:
    """Return what a finished cache lacks: the new variants of its blocks, and all variants of new samples' blocks.

    The listing is numbered as in the cache.
    """
    manifest = cache.manifest
    variants = tuple(variant for variant in range(recipe.variants + 1) if variant not in manifest.variants)
    blocks = _blocks_of(cache, listing, variants) if variants else []
    known = manifest.samples + len(manifest.skipped)
    first = 1 + max((entry.block for entry in manifest.shards), default=-1)
    return [*blocks, *plan_blocks(listing.samples[known:], manifest.fields, recipe, first)]


def _blocks_of(cache: Cache, listing: Listing, variants: tuple[int, ...]) -> list[Block]:
    """Return a cache's blocks with their kept samples, as blocks of some variants to be built."""
    numbers = cache.samples.numbers.tolist()
    blocks = []
    for entry in sorted(cache.manifest.shards, key=lambda entry: entry.block):
        if entry.variant == cache.manifest.variants[0]:
            part = numbers[entry.first : entry.first + entry.records]
            samples = tuple(listing.samples[number] for number in part)
            checksums = [] if entry.variant else cache.index_of(entry)["crc32"].tolist()
            blocks.append(Block(entry.block, samples, variants, dict(zip(part, checksums, strict=False))))
    return blocks


def cut_block(block: Block, fields: Sequence[Field], samples: int) -> list[Chunk]:
    """Cut a block of a cache of `samples` samples into chunks: no part of the layout, they only share out the work."""
    size = record_bytes(fields) * len(block.variants)
    most = max(1, min(_CHUNK_BYTES // size, -(-samples // MIN_CHUNKS)))
    parts: list[list[Sample]] = []
    weight = 0
    for sample in block.samples:
        if not parts or len(parts[-1]) == most or weight + sample.bytes > _CHUNK_BYTES:
            parts.append([])
            weight = 0
        parts[-1].append(sample)
        weight += sample.bytes
    return [
        Chunk(block.number, number, tuple(part), block.variants, _of_samples(block.clean, part))
        for number, part in enumerate(parts)
    ]


def _of_samples(clean: Mapping[int, int], samples: Sequence[Sample]) -> dict[int, int]:
    return {sample.number: clean[sample.number] for sample in samples if sample.number in clean}


def listing_sha256(listing: Listing) -> str:
    """Return a hash of a source's samples in order: all that is known of them unread, but for their sizes."""
    digest = hashlib.sha256(json.dumps(listing.classes).encode())
    for sample in listing.samples:
        digest.update(json.dumps([sample.number, sample.path, sample.label]).encode())
    for name, column in listing.columns.items():
        digest.update(json.dumps([name, [str(value) for value in column]]).encode())
    return digest.hexdigest()
