"""Chunks and receipts on disk: what is finished of a build, kept so that a rerun does not do it again.

A chunk is one file of records for each part (a variant, or a band of one) and, written last, a JSON file of metadata. A
chunk that a time limit cut short has its metadata under another name, so that it is never taken for a complete one.
Nothing here is synced: what a power cut tore is noticed (the metadata is no JSON, the sizes differ, or the CRC of a
record does when its shard is sealed) and made again. Once a shard is in its place, a receipt says so, and the chunks of
its block are removed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tpucache.store.files import write_atomically
from tpucache.store.format import Part, shard_name
from tpucache.store.manifest import ShardEntry, Skipped
from tpucache.store.samples import encode_columns
from tpucache.types import Array
from tpucache.warmup.run.folder import disk_failure
from tpucache.warmup.sources.source import Label, Sample

#: Under this name annotations of the source are counted; those of variants are counted under their numbers.
IN_SOURCE: Final = "source"
#: The name of a receipt, with its block and its part.
RECEIPT_NAME: Final = re.compile(r"shard-(\d{5,})-v(\d{4}(?:-[1-7])?)\.npz")


#: The array of a receipt that holds its JSON.
_METADATA: Final = "told"


class KeptSample(NamedTuple):
    """A sample that is kept: the label and columns that only its content states, and facts of its image."""

    number: int
    label: Label
    columns: Mapping[str, Any]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class ChunkInfo:
    """The facts of a chunk's samples, or of a block's; their records are elsewhere.

    `labels` (None where the listing has them) and each list in `columns` (None where a sample lacks that column) have
    one item for each of `numbers`. `sums` and `squares` are exact, for each channel of the clean images. `annotations`
    counts boxes, keypoints or masks by field: in the source, and in the records of each variant. `digests` has hashes
    of the content of some samples, by number: of all that are skipped, and of a few others.
    `frequencies` are what `measure_frequencies` found of a few samples, by number.
    """

    numbers: list[int] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    sums: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)
    annotations: dict[str, dict[str, int]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    frequencies: dict[str, list[list[float]]] = field(default_factory=dict)

    def add(self, samples: Sequence[KeptSample]) -> None:
        """Add samples that are kept. Where a source has a column with the name of a fact, the column is kept."""
        values = [{**sample.facts, **sample.columns} for sample in samples]
        for name in {*self.columns, *itertools.chain.from_iterable(values)}:
            column = self.columns.setdefault(name, [None] * len(self.numbers))
            column.extend(map(operator.methodcaller("get", name), values))
        self.numbers.extend(map(operator.attrgetter("number"), samples))
        self.labels.extend(map(operator.attrgetter("label"), samples))

    def count(self, place: str, counts: Mapping[str, int]) -> None:
        """Count the annotations of a sample that is kept."""
        for name, count in counts.items():
            places = self.annotations.setdefault(name, {})
            places[place] = places.get(place, 0) + count

    def covers(self, samples: Sequence[Sample]) -> bool:
        """Return whether these are all samples, kept or skipped."""
        numbers = sorted([*self.numbers, *(skip.number for skip in self.skipped)])
        return numbers == [sample.number for sample in samples]

    def to_dict(self) -> dict[str, Any]:
        """Return this as JSON values."""
        return {**vars(self), "skipped": [dataclasses.asdict(skipped) for skipped in self.skipped]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ChunkInfo:
        """Read what `to_dict` returned."""
        return cls(**{**content, "skipped": [Skipped(**skipped) for skipped in content["skipped"]]})


@dataclass(frozen=True)
class StoredChunk:
    """The metadata of a chunk on disk: its info, and the length and CRC-32 of each record by part."""

    info: ChunkInfo
    lengths: dict[Part, list[int]]
    crcs: dict[Part, list[int]]


def join_infos(infos: Sequence[ChunkInfo]) -> ChunkInfo:
    """Return one info for several, in their order."""
    names = sorted({name for info in infos for name in info.columns})
    joined = itertools.chain.from_iterable  # in a comprehension, each sample would take as long as it has columns
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
        frequencies={number: found for info in infos for number, found in info.frequencies.items()},
    )


def add_annotations(parts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Return the annotations of all parts. Where one part does not count a field's, their number is not known."""
    names = [name for name in (parts[0] if parts else ()) if all(name in part for part in parts)]
    return {
        name: {
            place: sum(part[name].get(place, 0) for part in parts)
            for place in dict.fromkeys(place for part in parts for place in part[name])
        }
        for name in names
    }


def save_chunk(
    work: Path, block: int, chunk: int, stored: StoredChunk, records: Mapping[Part, Sequence[bytes]], whole: bool = True
) -> None:
    """Write a chunk, or the beginning of one, its metadata last. Raises OSError."""
    # A worker that outlived a killed run may be writing the same chunk.
    temporary = work / f"spool.{uuid.uuid4().hex}.tmp"
    try:
        for part, data in records.items():
            with temporary.open("wb") as file:
                file.writelines(data)
            temporary.replace(_records_path(work, block, chunk, part))
        lengths, crcs = ({str(part): each for part, each in of.items()} for of in (stored.lengths, stored.crcs))
        content = {"note": stored.info.to_dict(), "lengths": lengths, "crcs": crcs}
        temporary.write_text(json.dumps(content))
        temporary.replace(_metadata_path(work, block, chunk, whole))
    finally:
        temporary.unlink(missing_ok=True)


def load_chunk(work: Path, block: int, chunk: int, parts: Sequence[Part], whole: bool = True) -> StoredChunk | None:
    """Return the metadata of a chunk, or of the beginning of one, that exists with all these parts, or None."""
    try:
        content = json.loads(_metadata_path(work, block, chunk, whole).read_bytes())
        lengths = {Part.parse(part): values for part, values in content["lengths"].items()}
        crcs = {Part.parse(part): values for part, values in content["crcs"].items()}
        if any(_records_path(work, block, chunk, part).stat().st_size != sum(lengths[part]) for part in parts):
            return None
        return StoredChunk(ChunkInfo.from_dict(content["note"]), lengths, crcs)
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # not made, or torn by a power cut
        return None


def read_records(
    work: Path, block: int, chunk: int, part: Part, stored: StoredChunk
) -> Iterator[tuple[int, bytes, int]]:
    """Yield (sample number, record, CRC-32) of a chunk's part. Raises OSError."""
    rows = zip(stored.info.numbers, stored.lengths[part], stored.crcs[part], strict=True)
    with _records_path(work, block, chunk, part).open("rb") as file:
        for number, length, crc in rows:
            yield number, file.read(length), crc


def stored_bytes(work: Path) -> int:
    """Return the bytes of the records of all chunks on disk."""
    return sum(path.stat().st_size for path in work.glob("chunk-*.bin"))


def has_results(work: Path) -> bool:
    """Return whether a work folder holds chunks or receipts of a build."""
    return any(path.name.startswith("chunk-") or RECEIPT_NAME.fullmatch(path.name) for path in work.iterdir())


def remove_chunks(work: Path, block: int) -> None:
    """Remove what is left of a block's chunks."""
    for path in work.glob(f"chunk-{block:05d}-*"):
        path.unlink(missing_ok=True)


def _metadata_path(work: Path, block: int, chunk: int, whole: bool = True) -> Path:
    return work / f"chunk-{block:05d}-{chunk:06d}{'' if whole else '-begun'}.json"


def _records_path(work: Path, block: int, chunk: int, part: Part) -> Path:
    return work / f"chunk-{block:05d}-{chunk:06d}-v{part}.bin"


@dataclass(frozen=True)
class BuiltShard:
    """A finished shard: its manifest entry (whose `first` is not known yet), its index rows, and its block's info."""

    entry: ShardEntry
    rows: Array
    info: ChunkInfo


def save_receipt(work: Path, shard: BuiltShard) -> None:
    """Record durably that a shard is finished. Raises BuildError."""
    metadata = json.dumps({"entry": shard.entry.to_dict(), "note": shard.info.to_dict()})
    columns = {_METADATA: np.frombuffer(metadata.encode(), np.uint8), "rows": shard.rows}
    path = receipt_path(work, shard.entry.block, shard.entry.part)
    try:
        write_atomically(path, encode_columns(columns))
    except OSError as error:
        raise disk_failure(path, error) from error


def load_receipt(cache: Path, work: Path, block: int, part: Part) -> BuiltShard | None:
    """Return a finished shard, or None when it has to be built: no receipt, or no such shard, here or at a URL."""
    try:
        with np.load(receipt_path(work, block, part), allow_pickle=False) as archive:
            metadata = json.loads(archive[_METADATA].tobytes())
            entry = ShardEntry(**metadata["entry"])
            if entry.name != shard_name(part, block):
                return None
            if not sent_path(work, block, part).exists() and (cache / entry.name).stat().st_size != entry.bytes:
                return None
            return BuiltShard(entry, archive["rows"], ChunkInfo.from_dict(metadata["note"]))
    except FileNotFoundError:
        return None


def receipt_path(work: Path, block: int, part: Part) -> Path:
    """Return where the receipt of a shard is."""
    return work / f"shard-{block:05d}-v{part}.npz"


def sent_path(work: Path, block: int, part: Part) -> Path:
    """Return the file that says, by being there, that a shard is at the URL that the cache goes to."""
    return receipt_path(work, block, part).with_suffix(".sent")


def sent_shards(work: Path) -> list[tuple[int, Part]]:
    """Return the block and the part of each shard that is at the URL that the cache goes to."""
    found = (RECEIPT_NAME.fullmatch(path.with_suffix(".npz").name) for path in work.glob("*.sent"))
    return sorted((int(each[1]), Part.parse(each[2])) for each in found if each)
