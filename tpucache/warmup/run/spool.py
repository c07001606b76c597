"""The finished records of a build on disk, so that readers can follow it, and the next run does not repeat it.

Workers write records into spool files. The process that builds notes them in two files: first what is known of the
samples, one line for each `Spooled`, then one row of ARRIVED_DTYPE for each record in the log (see
`tpucache.store.growing`).

If readers follow the build, each worker writes one spool file, which stays until the end. Otherwise each task writes
its own, which is removed once the shards of its block are finished, and the log has a name that no reader looks for.

None of these files is synced, so a power cut may damage them. A record or a line counts only with its checksum.

When a shard is finished, its receipt is written: a file that says so, and describes it and its samples.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import operator
import os
import re
import secrets
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.machine import pread
from tpucache.native import Array
from tpucache.store.files import OpenFile, read_file, write_atomically
from tpucache.store.format import shard_name
from tpucache.store.growing import (
    ARRIVED_DTYPE,
    ARRIVED_NAME,
    BUILD_ROW,
    MANIFEST_ROW,
    SPOOL_BIT,
    identity_row,
    spool_name,
)
from tpucache.store.manifest import ShardEntry, Skipped
from tpucache.store.samples import encode_columns
from tpucache.warmup.run.folder import disk_failure
from tpucache.warmup.sources.source import Label, Sample

#: The key for the number of annotations in the source. The keys for variants are their numbers.
IN_SOURCE: Final = "source"
#: The name of a receipt, with its block and its variant.
RECEIPT_NAME: Final = re.compile(r"shard-(\d{5,})-v(\d{4})\.npz")


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
        values = [{**sample.facts, **sample.columns} for sample in samples]
        for name in {*self.columns, *itertools.chain.from_iterable(values)}:
            column = self.columns.setdefault(name, [None] * len(self.numbers))
            column.extend(map(operator.methodcaller("get", name), values))
        self.numbers.extend(map(operator.attrgetter("number"), samples))
        self.labels.extend(map(operator.attrgetter("label"), samples))

    def count(self, place: str, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            places = self.annotations.setdefault(name, {})
            places[place] = places.get(place, 0) + count

    @property
    def every_number(self) -> list[int]:
        return [*self.numbers, *(skip.number for skip in self.skipped)]

    def covers(self, samples: Sequence[Sample]) -> bool:
        """Return whether the info has exactly these samples, kept or skipped."""
        return sorted(self.every_number) == [sample.number for sample in samples]

    @classmethod
    def join(cls, infos: Sequence[ChunkInfo]) -> ChunkInfo:
        names = sorted({name for info in infos for name in info.columns})
        joined = itertools.chain.from_iterable  # faster than a comprehension
        return cls(
            numbers=list(joined(info.numbers for info in infos)),
            skipped=list(joined(info.skipped for info in infos)),
            labels=list(joined(info.labels for info in infos)),
            columns={
                name: list(joined(info.columns.get(name, [None] * len(info.numbers)) for info in infos))
                for name in names
            },
            sums=[sum(values) for values in itertools.zip_longest(*(info.sums for info in infos), fillvalue=0)],
            squares=[sum(values) for values in itertools.zip_longest(*(info.squares for info in infos), fillvalue=0)],
            annotations=add_annotations([info.annotations for info in infos if info.numbers]),
            digests={number: digest for info in infos for number, digest in info.digests.items()},
        )

    def in_order(self) -> ChunkInfo:
        """Return the info with its samples in the order of their numbers."""
        order = np.argsort(self.numbers).tolist()
        return dataclasses.replace(
            self,
            numbers=sorted(self.numbers),
            skipped=sorted(self.skipped, key=operator.attrgetter("number")),
            labels=[self.labels[at] for at in order],
            columns={name: [values[at] for at in order] for name, values in self.columns.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "skipped": [dataclasses.asdict(skipped) for skipped in self.skipped]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ChunkInfo:
        return cls(**{**content, "skipped": [Skipped(**skipped) for skipped in content["skipped"]]})


def add_annotations(parts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Add up counts of annotations by field and, in each field, by `IN_SOURCE` or the number of a variant."""
    names = [name for name in (parts[0] if parts else ()) if all(name in part for part in parts)]
    return {
        name: {
            place: sum(part[name].get(place, 0) for part in parts)
            for place in dict.fromkeys(place for part in parts for place in part[name])
        }
        for name in names
    }


@dataclass(frozen=True)
class BuiltShard:
    """A finished shard: its entry in the manifest, its rows in the index, and the `info` of its samples.

    `entry.first` is 0 until the manifest is made.
    """

    entry: ShardEntry
    rows: Array
    info: ChunkInfo


def save_receipt(work: Path, build: str, shard: BuiltShard) -> None:
    metadata = json.dumps({"build": build, "entry": shard.entry.to_dict(), "note": shard.info.to_dict()})
    columns = {_METADATA: np.frombuffer(metadata.encode(), np.uint8), "rows": shard.rows}
    path = receipt_path(work, shard.entry.block, shard.entry.variant)
    try:
        write_atomically(path, encode_columns(columns))
    except OSError as error:
        raise disk_failure(path, error) from error


def load_receipt(cache: Path, work: Path, build: str, block: int, variant: int) -> BuiltShard | None:
    """Return a finished shard; None if its receipt is of another build, missing or damaged, or the shard is gone."""
    try:
        data = read_file(receipt_path(work, block, variant))
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            metadata = json.loads(archive[_METADATA].tobytes())
            entry = ShardEntry(**metadata["entry"])
            if (entry.name, metadata["build"]) != (shard_name(variant, block), build):
                return None
            if not sent_path(work, block, variant).exists() and (cache / entry.name).stat().st_size != entry.bytes:
                return None
            return BuiltShard(entry, archive["rows"], ChunkInfo.from_dict(metadata["note"]))
    except _DAMAGED:
        return None


def receipt_path(work: Path, block: int, variant: int) -> Path:
    return work / f"shard-{block:05d}-v{variant:04d}.npz"


def sent_path(work: Path, block: int, variant: int) -> Path:
    """Return the path of the file that marks a shard as sent to the URL or to Kaggle."""
    return receipt_path(work, block, variant).with_suffix(".sent")


def receipts(cache: Path, work: Path, build: str) -> Iterator[tuple[Path, ShardEntry | None]]:
    """Yield for each receipt the path that marks its shard as sent, and the shard; None if it cannot be used."""
    for path in sorted(work.glob("shard-*.npz")):
        if found := RECEIPT_NAME.fullmatch(path.name):
            shard = load_receipt(cache, work, build, int(found[1]), int(found[2]))
            yield path.with_suffix(".sent"), shard.entry if shard else None


_INFOS_NAME: Final = "arrived.jsonl"
_UNREAD_NAME: Final = "built.bin"
_threads: Final = threading.local()


class Spooled(NamedTuple):
    """Built samples of one block, and the log's rows of their records: (samples that are not skipped, variants)."""

    block: int
    info: ChunkInfo
    rows: Array


class Unwritten(NamedTuple):
    """Built samples of one block, and the records of each, one for each variant. They are not in a file yet."""

    block: int
    variants: int
    info: ChunkInfo
    records: list[Sequence[bytes]]

    @property
    def bytes(self) -> int:
        return sum(len(record) for records in self.records for record in records)


@dataclass(frozen=True)
class Log:
    """The notes of finished records of a build in the folder `work`. If not `is_followed`, readers cannot find them."""

    work: Path
    build: str
    is_followed: bool

    @property
    def path(self) -> Path:
        return self.work / (ARRIVED_NAME if self.is_followed else _UNREAD_NAME)

    @property
    def _first_row(self) -> bytes:
        return identity_row(BUILD_ROW, self.build).tobytes()

    def begin(self) -> None:
        """Make the log, or replace that of another build."""
        if not self.path.exists() or not read_file(self.path).startswith(self._first_row):
            write_atomically(self.path, self._first_row)

    def end(self, identity: str) -> None:
        """Note the identity of the manifest that is written next."""
        self.append_rows(identity_row(MANIFEST_ROW, identity))

    def append(self, made: Sequence[Spooled]) -> None:
        try:
            with (self.work / _INFOS_NAME).open("ab") as infos:
                infos.write("".join(map(self._to_line, made)).encode())
            self.append_rows(np.concatenate([each.rows.reshape(-1) for each in made]))
        except OSError as error:
            raise disk_failure(self.work, error) from error

    def append_rows(self, rows: Array) -> None:
        with self.path.open("ab") as file:
            file.write(rows.tobytes())

    def last_rows(self, count: int) -> Array:
        """Return the last row in the log of each of `count` records; a row of zeros for a record without one."""
        last = np.zeros(count, ARRIVED_DTYPE)
        try:
            data = read_file(self.path)
        except FileNotFoundError:
            return last
        if not data.startswith(self._first_row):
            return last
        whole = len(data) // ARRIVED_DTYPE.itemsize * ARRIVED_DTYPE.itemsize
        if whole < len(data):  # torn by a power cut
            os.truncate(self.path, whole)
        rows = np.frombuffer(data[:whole], ARRIVED_DTYPE)
        rows = rows[rows["row"] < count]
        last[rows["row"].astype(np.int64)] = rows
        return last

    def infos(self) -> Iterator[tuple[int, ChunkInfo]]:
        """Yield the number of a block and some of its built samples, for each line that is not damaged."""
        try:
            lines = (self.work / _INFOS_NAME).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return
        for line in lines:
            checksum, _, text = line.partition(" ")
            if checksum == self._checksum(text):
                content = json.loads(text)
                yield content["block"], ChunkInfo.from_dict(content["info"])

    def keep(self, made: Sequence[Spooled]) -> None:
        if (self.work / _INFOS_NAME).exists():
            write_atomically(self.work / _INFOS_NAME, "".join(map(self._to_line, made)).encode())

    def _to_line(self, made: Spooled) -> str:
        text = json.dumps({"block": made.block, "info": made.info.to_dict()})
        return f"{self._checksum(text)} {text}\n"

    def _checksum(self, text: str) -> str:
        return f"{zlib.crc32(f'{self.build}{text}'.encode()):08x}"

    def forget(self) -> None:
        """Forget all records that are in no shard yet, so that the next run builds them again."""
        (self.work / _INFOS_NAME).unlink(missing_ok=True)


def write_spool(work: Path, run: str, made: Sequence[Unwritten], *, is_followed: bool) -> list[Spooled]:
    records = [record for each in made for of_sample in each.records for record in of_sample]
    rows = np.zeros(len(records), ARRIVED_DTYPE)
    rows["length"] = [len(record) for record in records]
    rows["crc32"] = [zlib.crc32(record) for record in records]
    if records:
        try:
            number = _spool_number(work, run, is_followed=is_followed)
            # The file is closed, because on network file systems other machines see only then what was written.
            with (work / spool_name(number)).open("ab") as file:
                start = file.tell()
                file.writelines(records)
        except OSError as error:
            raise disk_failure(work, error) from error
        rows["file"] = number
        rows["offset"] = start + np.concatenate([[0], np.cumsum(rows["length"][:-1], dtype=np.int64)])
    stops = np.cumsum([sum(map(len, each.records)) for each in made])
    return [
        Spooled(each.block, each.info, some.reshape(len(each.records), each.variants))
        for each, some in zip(made, np.split(rows, stops[:-1].tolist()), strict=True)
    ]


def _spool_number(work: Path, run: str, *, is_followed: bool) -> int:
    """Make a new spool file; if readers follow the build, only for the first records of this thread in a run."""
    if is_followed and getattr(_threads, "run", None) == run:
        return int(_threads.number)
    while True:
        number = SPOOL_BIT | secrets.randbits(30)
        try:
            (work / spool_name(number)).open("xb").close()
        except FileExistsError:
            continue
        _threads.run, _threads.number = run, number
        return number


def are_right(work: Path, rows: Array) -> npt.NDArray[np.bool_]:
    """Return for each row whether its record is in a spool file and has the right checksum."""
    is_right = np.zeros(len(rows), np.bool_)
    is_spooled = (rows["file"] >= SPOOL_BIT) & (rows["length"] > 0)
    for number in {*rows["file"][is_spooled].tolist()}:  # np.unique would import numpy.ma
        try:
            file = OpenFile(work / spool_name(number))
        except FileNotFoundError:
            continue
        for at in np.flatnonzero(is_spooled & (rows["file"] == number)).tolist():
            record = pread(file.number, int(rows["length"][at]), int(rows["offset"][at]))
            is_right[at] = zlib.crc32(record) == rows["crc32"][at]
    return is_right


def read_spool(work: Path, rows: Array) -> Iterator[bytes]:
    files: dict[int, OpenFile] = {}
    for row in rows:
        number = int(row["file"])
        if number not in files:
            files[number] = OpenFile(work / spool_name(number))
        yield pread(files[number].number, int(row["length"]), int(row["offset"]))
