"""Chunks and receipts: the finished work of a build on disk, so that the next run does not repeat it.

A chunk has one file of records for each variant and, written last, a JSON file of
metadata. If a time limit cuts a chunk short, its metadata get another name, so that it is never mistaken for a complete
chunk.

When a shard is finished, its receipt is written: a file that says so. When all shards of a block are finished, the
chunks of the block are removed.

The files of chunks are not synced, so a power cut may damage them. A chunk is built again if its metadata are damaged,
a file has another size, or a record has another CRC when the shard is written.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import operator
import re
import struct
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tpucache.native import Array
from tpucache.store.files import read_file, write_atomically
from tpucache.store.format import shard_name
from tpucache.store.manifest import ShardEntry, Skipped
from tpucache.store.samples import encode_columns
from tpucache.warmup.run.folder import disk_failure
from tpucache.warmup.sources.source import Label, Sample

#: The key for the number of annotations in the source. The keys for variants are their numbers.
IN_SOURCE: Final = "source"
#: The name of a receipt, with its block and its variant.
RECEIPT_NAME: Final = re.compile(r"shard-(\d{5,})-v(\d{4})\.npz")


#: The key of a chunk's metadata with the CRC-32 of all else in it. Version 0.2 wrote none.
_CHECKSUM: Final = "crc32"
_OF_02: Final = {"note", "lengths", "crcs"}
#: The errors of reading a receipt that does not exist or is damaged: zipfile raises RuntimeError for some headers.
_DAMAGED: Final = (
    *(FileNotFoundError, EOFError, KeyError, TypeError, ValueError, RuntimeError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
#: The array of a receipt that holds its JSON.
_METADATA: Final = "told"


class KeptSample(NamedTuple):
    """A sample that is not skipped, with the `label` and the `columns` that are stored in the sample itself.

    `facts` has values of the sample's image, such as the width, by column of the samples table.
    """

    number: int
    label: Label
    columns: Mapping[str, Any]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class ChunkInfo:
    """Everything about the samples of a chunk or block that the tables and the manifest need, without the records.

    `numbers` are the numbers of the samples that are not skipped. `labels` and each list in `columns` have one item for
    each of these samples. A label is None if the listing has the labels, and an item of a column is None if the sample
    lacks this column. `sums` and `squares` are exact sums over each channel of the clean images. `annotations` has the
    counts of boxes, keypoints or masks by field: in the source, and in each variant. `digests` has content hashes by
    sample number: of all skipped samples, and of a few kept samples.
    """

    numbers: list[int] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    sums: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)
    annotations: dict[str, dict[str, int]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def add(self, samples: Sequence[KeptSample]) -> None:
        """Add samples that are not skipped.

        A column of the source replaces a column about images with the same name.
        """
        values = [{**sample.facts, **sample.columns} for sample in samples]
        for name in {*self.columns, *itertools.chain.from_iterable(values)}:
            column = self.columns.setdefault(name, [None] * len(self.numbers))
            column.extend(map(operator.methodcaller("get", name), values))
        self.numbers.extend(map(operator.attrgetter("number"), samples))
        self.labels.extend(map(operator.attrgetter("label"), samples))

    def count(self, place: str, counts: Mapping[str, int]) -> None:
        """Add a sample's counts of annotations, by field. `place` is `IN_SOURCE` or the number of a variant."""
        for name, count in counts.items():
            places = self.annotations.setdefault(name, {})
            places[place] = places.get(place, 0) + count

    def covers(self, samples: Sequence[Sample]) -> bool:
        """Return whether the info has exactly these samples, kept or skipped."""
        numbers = sorted([*self.numbers, *(skip.number for skip in self.skipped)])
        return numbers == [sample.number for sample in samples]

    def to_dict(self) -> dict[str, Any]:
        """Return the info as JSON values."""
        return {**vars(self), "skipped": [dataclasses.asdict(skipped) for skipped in self.skipped]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ChunkInfo:
        """Return an info from the JSON values of `to_dict`."""
        return cls(**{**content, "skipped": [Skipped(**skipped) for skipped in content["skipped"]]})


@dataclass(frozen=True)
class StoredChunk:
    """The metadata of a chunk on disk: its info, and the length and CRC-32 of each record by variant."""

    info: ChunkInfo
    lengths: dict[int, list[int]]
    crcs: dict[int, list[int]]


def join_infos(infos: Sequence[ChunkInfo]) -> ChunkInfo:
    """Join several infos, in order, into one."""
    names = sorted({name for info in infos for name in info.columns})
    joined = itertools.chain.from_iterable  # faster than a comprehension
    return ChunkInfo(
        numbers=list(joined(info.numbers for info in infos)),
        skipped=list(joined(info.skipped for info in infos)),
        labels=list(joined(info.labels for info in infos)),
        columns={
            name: list(joined(info.columns.get(name, [None] * len(info.numbers)) for info in infos)) for name in names
        },
        sums=[sum(values) for values in itertools.zip_longest(*(info.sums for info in infos), fillvalue=0)],
        squares=[sum(values) for values in itertools.zip_longest(*(info.squares for info in infos), fillvalue=0)],
        annotations=add_annotations([info.annotations for info in infos if info.numbers]),
        digests={number: digest for info in infos for number, digest in info.digests.items()},
    )


def add_annotations(parts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Add up counts of annotations by field and, in each field, by `IN_SOURCE` or the number of a variant.

    A field that one of the `parts` lacks is left out.
    """
    names = [name for name in (parts[0] if parts else ()) if all(name in part for part in parts)]
    return {
        name: {
            place: sum(part[name].get(place, 0) for part in parts)
            for place in dict.fromkeys(place for part in parts for place in part[name])
        }
        for name in names
    }


def save_chunk(
    work: Path, block: int, chunk: int, stored: StoredChunk, records: Mapping[int, Sequence[bytes]], whole: bool = True
) -> None:
    """Write a chunk to the folder `work`: a file of records for each variant, and then its metadata, `stored`.

    `block` and `chunk` are the numbers of the block and of the chunk. If not `whole`, a time limit or a stop cut the
    chunk short, so that `stored` and `records` have only its first samples; `load_chunk` then returns it only with
    whole=False. Raises OSError if a file cannot be written.
    """
    # A unique name, because a worker of a killed run may still be writing the same chunk.
    temporary = work / f"spool.{uuid.uuid4().hex}.tmp"
    try:
        for variant, data in records.items():
            with temporary.open("wb") as file:
                file.writelines(data)
            temporary.replace(_records_path(work, block, chunk, variant))
        lengths, crcs = (
            {f"{variant:04d}": each for variant, each in by.items()} for by in (stored.lengths, stored.crcs)
        )
        content = {"note": stored.info.to_dict(), "lengths": lengths, "crcs": crcs}
        temporary.write_text(json.dumps({**content, _CHECKSUM: _checksum(content)}))
        temporary.replace(_metadata_path(work, block, chunk, whole))
    finally:
        temporary.unlink(missing_ok=True)


def load_chunk(work: Path, block: int, chunk: int, variants: Sequence[int], whole: bool = True) -> StoredChunk | None:
    """Return the metadata of a chunk or, if not `whole`, of a chunk's beginning.

    Returns None if the metadata are missing or damaged, or if a file of records is missing or has a wrong size.
    """
    try:
        content = json.loads(_metadata_path(work, block, chunk, whole).read_bytes())
        if _CHECKSUM not in content and content.keys() != _OF_02:
            return None
        if content.pop(_CHECKSUM, _checksum(content)) != _checksum(content):
            return None
        lengths = {int(variant): values for variant, values in content["lengths"].items()}
        crcs = {int(variant): values for variant, values in content["crcs"].items()}
        if any(
            _records_path(work, block, chunk, variant).stat().st_size != sum(lengths[variant]) for variant in variants
        ):
            return None
        return StoredChunk(ChunkInfo.from_dict(content["note"]), lengths, crcs)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):  # not made, or torn by a power cut
        return None


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def read_records(
    work: Path, block: int, chunk: int, variant: int, stored: StoredChunk
) -> Iterator[tuple[int, bytes, int]]:
    """Yield (sample number, record, CRC-32) for each record of one variant of a chunk. Raises OSError."""
    rows = zip(stored.info.numbers, stored.lengths[variant], stored.crcs[variant], strict=True)
    with _records_path(work, block, chunk, variant).open("rb") as file:
        for number, length, crc in rows:
            yield number, file.read(length), crc


def stored_bytes(work: Path) -> int:
    """Return how many bytes the records of all chunks take on disk."""
    return sum(path.stat().st_size for path in work.glob("chunk-*.bin"))


def has_results(work: Path) -> bool:
    """Return whether a work folder holds chunks or receipts of a build."""
    return any(path.name.startswith("chunk-") or RECEIPT_NAME.fullmatch(path.name) for path in work.iterdir())


def remove_chunks(work: Path, block: int) -> None:
    """Remove all files of a block's chunks."""
    for path in work.glob(f"chunk-{block:05d}-*"):
        path.unlink(missing_ok=True)


def _metadata_path(work: Path, block: int, chunk: int, whole: bool = True) -> Path:
    return work / f"chunk-{block:05d}-{chunk:06d}{'' if whole else '-begun'}.json"


def _records_path(work: Path, block: int, chunk: int, variant: int) -> Path:
    return work / f"chunk-{block:05d}-{chunk:06d}-v{variant:04d}.bin"


@dataclass(frozen=True)
class BuiltShard:
    """A finished shard: its entry in the manifest, its rows in the index, and the `info` of its samples.

    `entry.first` is 0 until the manifest is made.
    """

    entry: ShardEntry
    rows: Array
    info: ChunkInfo


def save_receipt(work: Path, shard: BuiltShard) -> None:
    """Record durably that a shard is finished. Raises BuildError."""
    metadata = json.dumps({"entry": shard.entry.to_dict(), "note": shard.info.to_dict()})
    columns = {_METADATA: np.frombuffer(metadata.encode(), np.uint8), "rows": shard.rows}
    path = receipt_path(work, shard.entry.block, shard.entry.variant)
    try:
        write_atomically(path, encode_columns(columns))
    except OSError as error:
        raise disk_failure(path, error) from error


def load_receipt(cache: Path, work: Path, block: int, variant: int) -> BuiltShard | None:
    """Return a finished shard; None if its receipt is missing or damaged, or if the shard does not exist any more.

    A shard exists if its file is in the folder `cache`, or if it was sent to the URL or to Kaggle.
    """
    try:
        data = read_file(receipt_path(work, block, variant))
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            metadata = json.loads(archive[_METADATA].tobytes())
            entry = ShardEntry(**metadata["entry"])
            if entry.name != shard_name(variant, block):
                return None
            if not sent_path(work, block, variant).exists() and (cache / entry.name).stat().st_size != entry.bytes:
                return None
            return BuiltShard(entry, archive["rows"], ChunkInfo.from_dict(metadata["note"]))
    except _DAMAGED:
        return None


def receipt_path(work: Path, block: int, variant: int) -> Path:
    """Return the path of a shard's receipt."""
    return work / f"shard-{block:05d}-v{variant:04d}.npz"


def sent_path(work: Path, block: int, variant: int) -> Path:
    """Return the path of the file that marks a shard as sent to the URL or to Kaggle."""
    return receipt_path(work, block, variant).with_suffix(".sent")


def sent_shards(work: Path) -> list[tuple[int, int]]:
    """Return the block and the variant of each shard that is marked as sent."""
    found = (RECEIPT_NAME.fullmatch(path.with_suffix(".npz").name) for path in work.glob("*.sent"))
    return sorted((int(each[1]), int(each[2])) for each in found if each)
