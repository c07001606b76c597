"""The finished records of a build on disk, so that readers can follow it, and the next run does not repeat it.

Workers write records into spool files. The process that builds notes them in two files: first what is known of the
samples, one line for each `Spooled`, then one row of ARRIVED_DTYPE for each record in the log (see
`tpucache.store.growing`).

If readers follow the build, each worker writes one spool file, which stays until the end. Otherwise each task writes
its own, which is removed once the shards of its block are finished, and the log has a name that no reader looks for.

None of these files is synced, so a power cut may damage them. A record or a line counts only with its checksum.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.machine import pread
from tpucache.store.files import OpenFile, write_atomically
from tpucache.store.growing import ARRIVED_DTYPE, ARRIVED_NAME, SPOOL_BIT, spool_name
from tpucache.warmup.run.chunks import ChunkInfo
from tpucache.warmup.run.folder import disk_failure

Rows = npt.NDArray[Any]

_INFOS_NAME: Final = "arrived.jsonl"
_UNREAD_NAME: Final = "built.bin"
_threads: Final = threading.local()


class Spooled(NamedTuple):
    """Built samples of one block, and the log's rows of their records: (samples that are not skipped, variants)."""

    block: int
    info: ChunkInfo
    rows: Rows


class Unwritten(NamedTuple):
    """Built samples of one block, and the records of each, one for each variant. They are not in a file yet."""

    block: int
    variants: int
    info: ChunkInfo
    records: list[Sequence[bytes]]

    def keep(self, _number: int, records: Sequence[bytes]) -> None:
        self.records.append(records)

    @property
    def bytes(self) -> int:
        return sum(len(record) for records in self.records for record in records)


@dataclass(frozen=True)
class Log:
    """The notes of finished records in the folder `work`. If not `is_followed`, readers cannot find them."""

    work: Path
    is_followed: bool

    @property
    def path(self) -> Path:
        return self.work / (ARRIVED_NAME if self.is_followed else _UNREAD_NAME)

    def append(self, made: Sequence[Spooled]) -> None:
        try:
            with (self.work / _INFOS_NAME).open("ab") as infos:
                infos.write("".join(map(_to_line, made)).encode())
            self.append_rows(np.concatenate([each.rows.reshape(-1) for each in made]))
        except OSError as error:
            raise disk_failure(self.work, error) from error

    def append_rows(self, rows: Rows) -> None:
        with self.path.open("ab") as file:
            file.write(rows.tobytes())

    def last_rows(self, count: int) -> Rows:
        """Return the last row in the log of each of `count` records; a row of zeros for a record without one."""
        last = np.zeros(count, ARRIVED_DTYPE)
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
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
            if checksum == _checksum(text):
                content = json.loads(text)
                yield content["block"], ChunkInfo.from_dict(content["info"])

    def keep(self, made: Sequence[Spooled]) -> None:
        if (self.work / _INFOS_NAME).exists():
            write_atomically(self.work / _INFOS_NAME, "".join(map(_to_line, made)).encode())

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
        number = SPOOL_BIT | secrets.randbits(30)  # numbers with the next bit stand for readers' files in memory
        try:
            (work / spool_name(number)).open("xb").close()
        except FileExistsError:
            continue
        _threads.run, _threads.number = run, number
        return number


def are_right(work: Path, rows: Rows) -> npt.NDArray[np.bool_]:
    """Return for each row whether its record is in a spool file and has the right checksum."""
    is_right = np.zeros(len(rows), np.bool_)
    is_spooled = (rows["file"] >= SPOOL_BIT) & (rows["length"] > 0)
    for number in np.unique(rows["file"][is_spooled]).tolist():
        try:
            file = OpenFile(work / spool_name(number))
        except FileNotFoundError:
            continue
        for at in np.flatnonzero(is_spooled & (rows["file"] == number)).tolist():
            record = pread(file.number, int(rows["length"][at]), int(rows["offset"][at]))
            is_right[at] = zlib.crc32(record) == rows["crc32"][at]
    return is_right


def read_spool(work: Path, rows: Rows) -> Iterator[bytes]:
    files: dict[int, OpenFile] = {}
    for row in rows:
        number = int(row["file"])
        if number not in files:
            files[number] = OpenFile(work / spool_name(number))
        yield pread(files[number].number, int(row["length"]), int(row["offset"]))


def _to_line(made: Spooled) -> str:
    text = json.dumps({"block": made.block, "info": made.info.to_dict()})
    return f"{_checksum(text)} {text}\n"


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
