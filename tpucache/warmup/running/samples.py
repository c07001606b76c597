"""What is made of samples: their records, and what is known of them beside these."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy.typing as npt

from tpucache.errors import BuildError, SampleError
from tpucache.store.fields import IMAGE
from tpucache.store.manifest import Skipped
from tpucache.warmup.planning.blocks import Chunk
from tpucache.warmup.records.moments import Moments, add_moments, moments
from tpucache.warmup.running.consistency import check_clean
from tpucache.warmup.running.context import BuildContext
from tpucache.warmup.sources.base import content_sha256
from tpucache.warmup.work.chunks import IN_SOURCE, ChunkInfo
from tpucache.warmup.work.lock import is_held

Array = npt.NDArray[Any]

#: Just below the largest piece of memory that glibc adapts to.
_LARGEST_PIECE: Final = (32 << 20) - (8 << 10)
#: Of images that are added up together: right after its decode, each alone would take longer.
_ADDED_BYTES: Final = 2 << 20
#: How often a worker looks whether its run is still there: the look takes as long as a small image's resize.
_CHECK_SECONDS: Final = 0.05


def add_samples(
    context: BuildContext, chunk: Chunk, first: int, info: ChunkInfo, keep: Callable[[int, Sequence[bytes]], None]
) -> int:
    """Add a chunk's samples from the `first` on to `info`; return where the deadline stopped it.

    `keep` is given each kept sample's number and its records, one each variant.
    """
    totals: Moments = (info.sums, info.squares)
    images: list[Array] = []  # whose moments are still to be added
    done, checked = first, -_CHECK_SECONDS
    for sample in chunk.samples[first:]:
        if time.monotonic() - checked >= _CHECK_SECONDS:
            check_run(context)
            checked = time.monotonic()
        if context.deadline.is_past:
            break
        done += 1
        try:
            encoded = context.encoder.encode(sample, chunk.variants)
        except SampleError as error:
            if not context.skip_errors:
                raise
            info.skipped.append(Skipped(sample.number, sample.path, error.reason))
            info.digests[str(sample.number)] = content_sha256(context.encoder.source, sample)
            continue
        if sample.number in context.compared:
            info.digests[str(sample.number)] = encoded.item.sha256()
        if sample.number in chunk.clean:
            check_clean(context, sample, encoded, chunk.clean[sample.number])
        keep(sample.number, encoded.records)
        if IMAGE in encoded.clean:
            images.append(encoded.clean[IMAGE])
            if len(images) * images[0].nbytes >= _ADDED_BYTES:
                totals = _add_images(totals, images)
        info.add(sample.number, encoded.item)
        for place, counts in zip((IN_SOURCE, *map(str, chunk.variants)), encoded.counts, strict=True):
            info.count(place, counts)
    info.sums[:], info.squares[:] = _add_images(totals, images)
    return done


def _add_images(totals: Moments, images: list[Array]) -> Moments:
    """Return the sums with those of images added, and empty the list."""
    for image in images:
        totals = add_moments(totals, moments(image))
    images.clear()
    return totals


@functools.cache
def keep_freed_memory() -> None:
    """Make this process use freed memory again, rather than give every array back to the system and fetch it anew.

    glibc keeps pieces as large as the largest that it has seen freed. This one is never touched, so it takes no memory.
    """
    bytearray(_LARGEST_PIECE)


def check_run(context: BuildContext) -> None:
    """Stop a worker whose run was killed: another one may be working in the same place by now."""
    if not is_held(context.work, context.run):
        raise BuildError(f"the run that this worker builds {context.shards} for is gone")
