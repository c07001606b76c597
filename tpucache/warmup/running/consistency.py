"""Whether records are made today as those that exist already: what is added must be of the same samples and code."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tpucache.errors import BuildError, SampleError
from tpucache.store.cache import Cache
from tpucache.warmup.records.encode import EncodedSample
from tpucache.warmup.running.context import BuildContext
from tpucache.warmup.sources.base import Sample

_TRIED: Final = 8
#: Where libraries differ, so that rare kinds of files are tried, too.
_TRIED_OF_OTHER_VERSIONS: Final = 64

#: A sample's number -> the CRC-32 of its record in some variants.
Known = Mapping[int, Mapping[int, int]]


def known_records(cache: Cache) -> Known:
    """Return the checksums of some of a finished cache's samples: of the clean variant, and of two augmented ones."""
    manifest = cache.manifest
    positions = np.arange(0, manifest.samples, max(1, manifest.samples // (2 * _TRIED_OF_OTHER_VERSIONS)))
    augmented = manifest.variants[1:]
    variants = sorted({*manifest.variants[:1], *augmented[:1], *augmented[-1:]})
    checksums = [cache.index[cache.rows(variant, positions)]["crc32"].tolist() for variant in variants]
    return {
        number: dict(zip(variants, of_sample, strict=True))
        for number, *of_sample in zip(cache.samples.numbers[positions].tolist(), *checksums, strict=True)
    }


def check_records(context: BuildContext, samples: Sequence[Sample], known: Known) -> None:
    """Encode a few samples again and raise BuildError when their records differ; samples that fail do not count.

    `samples` are by number. One sample of each kind of file is among those tried.
    """
    most = _TRIED_OF_OTHER_VERSIONS if context.other_versions else _TRIED
    numbers = list(known)
    kinds = {Path(samples[number].path).suffix.lower(): number for number in reversed(numbers)}
    for number in sorted({*numbers[:: max(1, len(numbers) // most)][:most], *list(kinds.values())[:most]}):
        checksums = known[number]
        try:
            records = context.encoder.encode(samples[number], list(checksums)).records
        except SampleError:
            continue
        for (variant, checksum), record in zip(checksums.items(), records, strict=True):
            if zlib.crc32(record) != checksum:
                raise _difference(context, samples[number], variant)


def check_clean(context: BuildContext, sample: Sample, encoded: EncodedSample, checksum: int) -> None:
    """Raise BuildError when the CRC-32 of a sample's clean record is not the one that its cache has."""
    if zlib.crc32(context.encoder.to_record(encoded.clean)) != checksum:
        raise _difference(context, sample, 0)


def _difference(context: BuildContext, sample: Sample, variant: int) -> BuildError:
    what = f"variant {variant}" if variant else "the clean record"
    if context.other_versions:
        why = f"it was made with other versions ({'; '.join(context.other_versions)}): use those"
    elif variant:
        why = "the source or what the augmentation uses changed since, or it is not reproducible: bring both back"
    else:
        why = "its source changed since without changing its size, or code that it uses did: bring it back as it was"
    return BuildError(
        f"{sample.path!r}: {what} comes out as something else than {context.shards} has. So that versions are not "
        f"mixed, nothing is added: {why}, or give another folder to build anew"
    )
