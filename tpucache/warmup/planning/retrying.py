"""The skipped samples of a finished cache, as blocks to be tried again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tpucache.errors import SourceError, UsageError
from tpucache.progress import Progress
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.copying import earlier_tables
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.warmup.planning.blocks import Block, plan_blocks
from tpucache.warmup.planning.listing_check import content_digests
from tpucache.warmup.sources.base import Listing, Sample, Source, content_sha256
from tpucache.warmup.versions import version_differences

Numbers = npt.NDArray[np.int64]


def check_can_retry(cache: Cache, is_growing: bool) -> None:
    """Raise UsageError when samples or variants are to be added as well, SourceError when labels were changed."""
    if is_growing:
        raise UsageError(
            f"the source or the options have more samples or variants than {cache.directory}: add them first, by the "
            "same command without --retry"
        )
    if earlier_tables(cache.manifest):
        raise SourceError(
            f"{cache.directory} was relabelled, and the new labels of its skipped samples are not known: build the "
            "cache anew in another folder, and relabel that"
        )


def new_block_numbers(manifest: Manifest) -> dict[int, int]:
    """Return another number for each block of a cache, in the same order; no shard of the cache has one of them."""
    blocks = sorted({entry.block for entry in manifest.shards})
    first = 0 if blocks[0] >= len(blocks) else blocks[-1] + 1
    return {block: first + at for at, block in enumerate(blocks)}


def grown_bytes(manifest: Manifest, blocks: Sequence[Block]) -> int:
    """Return the bytes of the shards of a cache to which retried blocks may add samples."""
    numbers, grown = new_block_numbers(manifest), {block.number for block in blocks}
    return sum(entry.bytes for entry in manifest.shards if numbers[entry.block] in grown)


def is_read_as_before(manifest: Manifest, recipe: Recipe) -> bool:
    """Return whether a sample that a cache skipped would fail again, unless its content has changed."""
    return not version_differences(manifest.created_by) and manifest.recipe.get("max_pixels") == recipe.max_pixels


def unchanged_samples(source: Source, listing: Listing, cache: Cache, recipe: Recipe) -> frozenset[int]:
    """Return the numbers of the skipped samples that would fail again: those that are read as they were.

    None where libraries or limits are others, nor where it is not known how a sample was read. The listing is numbered
    as in the cache.
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
    """Return the skipped samples as blocks, each with the new number of the block of the cache that it belongs to.

    Those that are `unchanged` are left out. The listing is numbered as in the cache.
    """
    manifest = cache.manifest
    entries = [entry for entry in manifest.shards if entry.variant == manifest.variants[0]]
    entries.sort(key=lambda entry: entry.block)
    skipped = sorted({skip.number for skip in manifest.skipped} - unchanged)
    places = _places(cache, entries, np.array(skipped, np.int64), listing, recipe)
    parts: dict[int, list[Sample]] = {}
    for number, place in zip(skipped, places.tolist(), strict=True):
        parts.setdefault(entries[place].block, []).append(listing.samples[number])
    numbers = new_block_numbers(manifest)
    return [Block(numbers[block], tuple(samples), manifest.variants) for block, samples in parts.items()]


def _places(cache: Cache, entries: Sequence[ShardEntry], skipped: Numbers, listing: Listing, recipe: Recipe) -> Numbers:
    """Return which of a cache's blocks each skipped sample belongs to: int64 (n,).

    Where the cache was built at once, these are the blocks that it was planned with. Where it has grown, a sample
    between two blocks belongs to the later one, because where one ended is no longer known.
    """
    kept = cache.samples.numbers.astype(np.int64)
    starts = [block.samples[0].number for block in plan_blocks(listing.samples, cache.manifest.fields, recipe)]
    own = np.repeat(np.arange(len(entries)), [entry.records for entry in entries])
    if len(starts) == len(entries) and np.array_equal(np.searchsorted(starts, kept, side="right") - 1, own):
        return np.searchsorted(starts, skipped, side="right") - 1
    firsts = [entry.first for entry in entries]
    return np.searchsorted(firsts, np.searchsorted(kept, skipped), side="right") - 1
