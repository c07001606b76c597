"""Divides samples into blocks, which become shards, and blocks into chunks, which become tasks.

The division into blocks does not depend on the number of workers. When the skipped samples of a finished cache are
tried again, they become blocks, too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.progress import Progress
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.codecs import CODECS
from tpucache.store.copying import earlier_tables
from tpucache.store.fields import Field, part_layouts
from tpucache.store.format import Part
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.warmup.library_versions import version_differences
from tpucache.warmup.listing import content_digests
from tpucache.warmup.sources.source import Listing, Sample, Source

# A small cache is divided, too, so that several workers write its shards at the same time.
_MIN_BLOCKS: Final = 8
MIN_BLOCK_SAMPLES: Final = 64
# The most bytes that one task writes or reads: a second or two of work, so that a kill loses little.
_CHUNK_BYTES: Final = 16 << 20
MIN_CHUNKS: Final = 64

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Samples in the order of their numbers. Their records form one shard for each part: a variant, or one band of it.

    `parts` are the parts to build. If the cache already has the clean records (variant 0) of these samples, `clean`
    maps each sample's number to the CRC-32s of its clean record, one for each band.
    """

    number: int
    samples: tuple[Sample, ...]
    parts: tuple[Part, ...]
    clean: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def variants(self) -> tuple[int, ...]:
        """The variants that are built for this block."""
        return variants_of(self.parts)


@dataclass(frozen=True)
class Chunk:
    """Consecutive samples of the block with the number `block`.

    One task decodes each of these samples once, and builds its records for all `parts`. `number` is the chunk's
    position in the block, from 0. `parts` and `clean` are as in `Block`, but `clean` has only these samples.
    """

    block: int
    number: int
    samples: tuple[Sample, ...]
    parts: tuple[Part, ...]
    clean: Mapping[int, Sequence[int]] = field(default_factory=dict)


def parts_of(variants: Iterable[int], fields: Sequence[Field]) -> tuple[Part, ...]:
    """Return the parts of the variants `variants`: one for each variant and band."""
    bands = range(len(part_layouts(fields)))
    return tuple(Part(variant, band) for variant in variants for band in bands)


def variants_of(parts: Iterable[Part]) -> tuple[int, ...]:
    """Return the variants of `parts`, each once, in the order of the parts."""
    return tuple(dict.fromkeys(part.variant for part in parts))


def record_bytes(fields: Sequence[Field]) -> int:
    """Return the expected bytes of a record with all its bands: exact for raw fields, typical for other codecs."""
    return max(1, round(sum(field.nbytes * CODECS[field.codec].typical_ratio for field in fields)))


def plan_blocks(samples: Sequence[Sample], fields: Sequence[Field], recipe: Recipe, first: int = 0) -> list[Block]:
    """Divide samples into blocks of equal size, give or take one sample, numbered from `first`.

    The records of one variant of a block take at most about `recipe.shard_mb` MiB, unless `recipe.max_blocks` allows
    only fewer and larger blocks.
    """
    if not samples:
        return []
    by_bytes = max(1, (recipe.shard_mb << 20) // record_bytes(fields))
    by_count = max(MIN_BLOCK_SAMPLES, -(-len(samples) // _MIN_BLOCKS))
    count = -(-len(samples) // min(by_bytes, by_count))
    count = min(count, recipe.max_blocks or count)
    bounds = [len(samples) * number // count for number in range(count + 1)]
    parts = parts_of(range(recipe.variants + 1), fields)
    return [
        Block(first + number, tuple(samples[start:stop]), parts)
        for number, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


def missing_blocks(cache: Cache, listing: Listing, recipe: Recipe) -> list[Block]:
    """Return the blocks to add to a finished cache: its own blocks with new variants, and blocks of new samples.

    The samples in `listing` have the same numbers as in the cache.
    """
    manifest = cache.manifest
    variants = tuple(variant for variant in range(recipe.variants + 1) if variant not in manifest.variants)
    blocks = _blocks_of(cache, listing, variants) if variants else []
    known = manifest.samples + len(manifest.skipped) + len(manifest.deleted)
    first = 1 + max((entry.block for entry in manifest.shards), default=-1)
    return [*blocks, *plan_blocks(listing.samples[known:], manifest.fields, recipe, first)]


def _blocks_of(cache: Cache, listing: Listing, variants: tuple[int, ...]) -> list[Block]:
    """Return the blocks of a finished cache, without skipped and deleted samples, and with the parts of `variants`."""
    numbers = cache.samples.numbers.tolist()
    manifest, blocks = cache.manifest, []
    parts = parts_of(variants, manifest.fields)
    for entry in sorted(manifest.shards, key=lambda entry: entry.block):
        if entry.part == (manifest.variants[0], 0):
            some = numbers[entry.first : entry.first + entry.records]
            samples = tuple(listing.samples[number] for number in some)
            bands = () if entry.variant else range(len(manifest.layouts))
            rows = (cache.rows_of(entry) + band * cache.rows_a_band for band in bands)
            checksums = zip(*(cache.index[of_band]["crc32"].tolist() for of_band in rows), strict=True)
            blocks.append(Block(entry.block, samples, parts, dict(zip(some, checksums, strict=False))))
    return blocks


def cut_block(block: Block, fields: Sequence[Field], samples: int) -> list[Chunk]:
    """Divide a block into chunks for workers. `samples` is the number of samples in all blocks.

    The bytes of shards do not depend on this division.
    """
    size = record_bytes(fields) * len(block.variants)  # a record's size includes all bands
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
        Chunk(block.number, number, tuple(part), block.parts, _of_samples(block.clean, part))
        for number, part in enumerate(parts)
    ]


def _of_samples(clean: Mapping[int, Sequence[int]], samples: Sequence[Sample]) -> dict[int, Sequence[int]]:
    return {sample.number: clean[sample.number] for sample in samples if sample.number in clean}


def listing_sha256(listing: Listing) -> str:
    """Return the hexadecimal SHA-256 of a listing: classes, columns, and numbers, paths and labels of samples."""
    digest = hashlib.sha256(json.dumps(listing.classes).encode())
    for sample in listing.samples:
        digest.update(json.dumps([sample.number, sample.path, sample.label]).encode())
    for name, column in listing.columns.items():
        digest.update(json.dumps([name, [str(value) for value in column]]).encode())
    return digest.hexdigest()


def check_can_retry(cache: Cache, is_growing: bool) -> None:
    """Raise an error if the skipped samples of a cache cannot be tried again.

    The error is a UsageError if the same run would also add samples or variants (`is_growing`), or if samples of the
    cache were deleted, and a SourceError if the cache was relabelled.
    """
    if is_growing:
        raise UsageError(
            f"the source or the options have more samples or variants than {cache.directory}: add them first, by the "
            "same command without --retry"
        )
    if cache.manifest.deleted:
        raise UsageError(
            f"samples of {cache.directory} were deleted, and a retry would bring back their records: run `tpucache "
            "compact` first, which removes these records"
        )
    if earlier_tables(cache.manifest):
        raise SourceError(
            f"{cache.directory} was relabelled, and the new labels of its skipped samples are not known: build the "
            "cache anew in another folder, and relabel the new cache"
        )


def new_block_numbers(manifest: Manifest) -> dict[int, int]:
    """Return a new number for each block of a cache, by the block's present number. The order of blocks stays the same.

    No shard of any version of the cache has one of the new numbers.
    """
    blocks = sorted({entry.block for entry in manifest.shards})
    first = 0 if blocks[0] >= len(blocks) and not manifest.parents else blocks[-1] + 1
    return {block: first + at for at, block in enumerate(blocks)}


def grown_bytes(manifest: Manifest, blocks: Sequence[Block]) -> int:
    """Return the total bytes of the shards to which the retried samples in `blocks` may be added."""
    numbers, grown = new_block_numbers(manifest), {block.number for block in blocks}
    return sum(entry.bytes for entry in manifest.shards if numbers[entry.block] in grown)


def is_read_as_before(manifest: Manifest, recipe: Recipe) -> bool:
    """Return whether the versions of libraries and `max_pixels` are those with which the cache was built.

    Then a skipped sample fails again if its content is the same.
    """
    return not version_differences(manifest.created_by) and manifest.recipe.get("max_pixels") == recipe.max_pixels


def unchanged_samples(source: Source, listing: Listing, cache: Cache, recipe: Recipe) -> frozenset[int]:
    """Return the numbers of the skipped samples that would fail again, because their content is the same as before.

    The set is empty if versions of libraries or `max_pixels` have changed. It lacks samples without a content hash in
    the manifest. The samples in `listing` have the same numbers as in the cache.
    """
    manifest = cache.manifest
    if not is_read_as_before(manifest, recipe):
        return frozenset()
    digests = content_digests(manifest)
    found = []
    with Progress(len(manifest.skipped), "compare", "skipped samples", is_brief=True) as progress:
        for skip in manifest.skipped:
            sample = listing.samples[skip.number]
            if skip.number in digests and content_sha256(source, sample) == digests[skip.number]:
                found.append(skip.number)
            progress.advance(1)
    return frozenset(found)


def retried_blocks(
    cache: Cache, listing: Listing, recipe: Recipe, unchanged: frozenset[int] = frozenset()
) -> list[Block]:
    """Return blocks of the skipped samples of a cache, without the samples whose numbers are in `unchanged`.

    Each block will be merged into a block of the cache, and has the number that `new_block_numbers` gives to that
    block. The samples in `listing` have the same numbers as in the cache.
    """
    manifest = cache.manifest
    entries = [entry for entry in manifest.shards if entry.part == (manifest.variants[0], 0)]
    entries.sort(key=lambda entry: entry.block)
    skipped = sorted({skip.number for skip in manifest.skipped} - unchanged)
    places = _places(cache, entries, np.array(skipped, np.int64), listing, recipe)
    parts: dict[int, list[Sample]] = {}
    for number, place in zip(skipped, places.tolist(), strict=True):
        parts.setdefault(entries[place].block, []).append(listing.samples[number])
    numbers = new_block_numbers(manifest)
    every = parts_of(manifest.variants, manifest.fields)
    return [Block(numbers[block], tuple(samples), every) for block, samples in parts.items()]


def _places(cache: Cache, entries: Sequence[ShardEntry], skipped: Numbers, listing: Listing, recipe: Recipe) -> Numbers:
    """Return the position in `entries` of the block to which each skipped sample belongs: int64 (n,).

    If the cache was built in one run, this is the block for which that run planned the sample. If samples were added
    later, the ends of blocks are not known exactly, and a sample between two blocks belongs to the later block.
    """
    kept = cache.samples.numbers.astype(np.int64)
    starts = [block.samples[0].number for block in plan_blocks(listing.samples, cache.manifest.fields, recipe)]
    own = np.repeat(np.arange(len(entries)), [entry.records for entry in entries])
    if len(starts) == len(entries) and np.array_equal(np.searchsorted(starts, kept, side="right") - 1, own):
        return np.searchsorted(starts, skipped, side="right") - 1
    firsts = [entry.first for entry in entries]
    return np.searchsorted(firsts, np.searchsorted(kept, skipped), side="right") - 1


def content_sha256(source: Source, sample: Sample) -> str:
    """Return the hexadecimal SHA-256 of a sample's content and labels, or "" if the sample cannot be read."""
    try:
        item = source.load(sample)
    except SampleError:
        return ""
    return item.sha256(sample.label, item.label)
