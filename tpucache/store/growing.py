"""GrowingCache: a cache that is read while it is built.

The builder writes finished records into files, and appends each record's file, offset, length and checksum to a log. A
reader follows the log, and waits for records that are not in it yet. `Prospect` has the parts of the manifest that are
known before the build; reading another part waits for the end.

Each build has a random identity, which its prospect and its log carry. So a reader notices when somebody removes the
folder, or builds or copies another cache there.

    .warmup/arrived.bin       the log, append-only: one row of ARRIVED_DTYPE for each finished record. A later row of
                              the record replaces it. A row with length 0 says that the record is lost. The first row
                              has the build's identity, and the last one that of the manifest, before it is written.
    .warmup/spool-8….bin      records, one after another: one file for each worker
    .warmup/wanted-….npy      int64: positions of samples, in the order in which a reader needs them; the samples of the
                              newest such file are built first
    .warmup/failure.txt       why the last build failed, for readers in other processes
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from tpucache import machine, process
from tpucache.errors import BuildError, FormatError, StoreError
from tpucache.store import lock
from tpucache.store.cache import Cache
from tpucache.store.fields import Field
from tpucache.store.files import OpenFile, ThreadLock, parse_npy, read_file
from tpucache.store.format import INDEX_DTYPE, MANIFEST_NAME, MAX_HEADER_BYTES, WORK_NAME
from tpucache.store.index import Numbers, RecordIndex, Rows
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.reader import Arriving, NetworkUse, ShardReader, Windows
from tpucache.store.samples import Column, SampleTable

ARRIVED_NAME: Final = "arrived.bin"
#: `file` is the number of a shard in the manifest, or the number of a spool file, whose highest bit is set.
ARRIVED_DTYPE: Final = np.dtype(
    [("row", "<u8"), ("offset", "<u8"), ("length", "<u4"), ("crc32", "<u4"), ("file", "<u4"), ("unused", "<u4")]
)
SPOOL_BIT: Final = 1 << 31
#: The value of `row` in a row of the log that has an identity instead of a record: of the build, or of the manifest.
BUILD_ROW: Final = (1 << 64) - 1
MANIFEST_ROW: Final = BUILD_ROW - 1
_IDENTITY_BYTES: Final = 24
#: A row of the index, and its number in the index. Rows of a growing cache have this type until the cache is finished.
_NUMBERED_DTYPE: Final = np.dtype([*INDEX_DTYPE.descr, ("row", "<u8")])
LOCK_NAME: Final = "lock"
FAILURE_NAME: Final = "failure.txt"
_WANTED: Final = "wanted-"

_POLL_SECONDS: Final = 0.008
_CHECK_SECONDS: Final = 0.05  # between two checks whether this process's builder has failed
_LOOK_SECONDS: Final = 0.5  # between two checks whether any process still builds
_GONE_SECONDS: Final = 2.0  # after a folder was removed, the process that builds takes a moment to say why
_PATIENCE_SECONDS: Final = 20.0  # readers give up after this time without a builder; another one may come meanwhile
_READ_ROWS: Final = 1 << 16  # rows of the log per read call
_LONGEST: Final = 4000  # bytes of a failure message

#: The attributes of a manifest that are known before the build, and those that are known only after it.
_EARLY: Final = ("samples", "variants", "fields", "classes", "value_names", "mask_names", "recipe", "version")
_LATE: Final = frozenset(item.name for item in fields(Manifest)) - {*_EARLY}


def new_identity() -> str:
    """Return a random identity of a build: hexadecimal digits."""
    return secrets.token_hex(_IDENTITY_BYTES)


def identity_row(kind: int, identity: str) -> npt.NDArray[Any]:
    """Return the row of the log that has an identity, cut to 48 hexadecimal digits."""
    data = kind.to_bytes(8, "little") + bytes.fromhex(identity)[:_IDENTITY_BYTES].ljust(_IDENTITY_BYTES)
    return np.frombuffer(data, ARRIVED_DTYPE)


def spool_name(file: int) -> str:
    """Return the name of the spool file with this number, into which one worker writes finished records."""
    return f"spool-{file:08x}.bin"


def ask_for(work: Path, positions: Numbers) -> None:
    """Ask the builder, by a file in the folder `work`, to make the samples at these positions next, in this order.

    Does nothing once the cache is finished: then there is no such folder.
    """
    name = f"{_WANTED}{time.time_ns():020d}-{secrets.token_hex(4)}.npy"
    aside = work / f".{name}.tmp"
    with contextlib.suppress(FileNotFoundError):
        with aside.open("xb") as file:
            np.save(file, positions.astype(np.int64), allow_pickle=False)
        aside.rename(work / name)


def list_asked(work: Path) -> list[str]:
    """Return the names of the files that `ask_for` wrote into the folder `work`, the oldest first."""
    with os.scandir(work) as entries:
        files = (entry.name for entry in entries if entry.is_file(follow_symlinks=False))
        return sorted(name for name in files if name.startswith(_WANTED))


def take_asked(path: Path, samples: int) -> Numbers:
    """Remove a file that `ask_for` wrote, and return its positions, all below `samples`; none if it cannot be read."""
    with contextlib.suppress(OSError, FormatError):
        found = parse_npy(read_file(path, MAX_HEADER_BYTES + 8 * samples))
        path.unlink()
        if found.ndim == 1 and found.dtype.kind in "iu":
            return found[(found >= 0) & (found < samples)].astype(np.int64)
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Prospect:
    """The parts of a manifest and of a samples table that are known before the records are made.

    `build` is the identity of the build, `source` the number, the hash and the order of the source's samples, `shards`
    the names of the future shards in the manifest's order, and `table` the columns that listing the source gave.
    """

    build: str
    source: Mapping[str, Any]
    samples: int
    variants: tuple[int, ...]
    fields: tuple[Field, ...]
    classes: tuple[str, ...]
    value_names: tuple[str, ...]
    mask_names: tuple[str, ...]
    recipe: Mapping[str, Any]
    version: int
    shards: tuple[str, ...]
    table: Mapping[str, Column]

    def fits(self, manifest: Manifest) -> bool:
        """Return whether a manifest is that of a build with the same recipe and the same samples."""
        is_same = all(getattr(self, name) == getattr(manifest, name) for name in _EARLY)
        return is_same and all(manifest.source.get(name) == value for name, value in self.source.items())


class GrowingManifest(Manifest):
    """The manifest of a growing cache. Reading an attribute that is known only after the build waits for the build."""

    def __init__(self, prospect: Prospect, wait: Callable[[], Manifest]) -> None:
        for name in _EARLY:
            object.__setattr__(self, name, getattr(prospect, name))
        object.__setattr__(self, "_wait", wait)

    def __getattr__(self, name: str) -> Any:
        if name in _LATE:
            return getattr(self.__dict__["_wait"](), name)
        raise AttributeError(f"a manifest has no {name!r}")


class GrowingTable(SampleTable):
    """The samples table of a growing cache: the columns that listing the source gave, in memory."""

    def __init__(self, directory: Path, columns: Mapping[str, Column]) -> None:
        """Store the columns. Messages name the folder `directory`: no file has the columns yet."""
        self._path, self._names, self._loaded = directory, [*columns], dict(columns)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()  # with the columns: no file has them


class GrowingIndex(RecordIndex, Arriving):
    """The index of a growing cache: the rows of the records that this process has found in the log so far.

    Reading other rows waits until their records are made. Threads may share it. `check` is None if this process did not
    start the build; `identities` has that of the finished manifest, if it is known.
    """

    def __init__(
        self, directory: Path, prospect: Prospect, check: Callable[[], bool] | None, identities: Sequence[str] = ()
    ) -> None:
        rows = prospect.samples * len(prospect.variants)
        self.directory, self._prospect, self._check_builder = directory, prospect, check
        self._count, self._samples = rows, max(1, prospect.samples)
        self._identities = {*identities}
        self._rows = np.zeros(rows, _NUMBERED_DTYPE)
        self._rows["row"] = np.arange(rows)
        self._is_here = np.zeros(rows, np.bool_)
        #: Whether this process has compared the record that the log names with its checksum.
        self.is_proven = np.zeros(rows, np.bool_)
        self._log: OpenFile | None = None
        self._at = 0
        self._files: dict[int, OpenFile] = {}
        self._lock = ThreadLock()
        self._checked = self._looked = self._seen = 0.0
        self._last_built = 0.0  # when a builder was last seen at work
        self._is_own = False  # whether this process started the builder
        self._is_asked = np.zeros(rows, np.bool_)
        self.finished: Cache | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return GrowingIndex, (self.directory, self._prospect, None, (*self._identities,))

    def __len__(self) -> int:
        return self._count

    def read_all(self) -> Rows:
        return self.wait().index.read_all()

    def is_right(self) -> bool:
        return self.wait().index.is_right()

    @property
    def share(self) -> float:
        """The fraction of the records that are made, as far as this process knows."""
        return 1.0 if self.finished is not None else float(self._is_here.mean()) if self._count else 1.0

    def look(self) -> bool:
        """Read the new part of the log, and return whether the cache is finished.

        Raises StoreError if the folder was removed, or has another cache now.
        """
        if self.finished is None:
            with self._lock:
                self._seen = time.monotonic()
                if self.finished is None:
                    self._read_log()
                    is_gone = not self._is_in_place()
                    if (self.directory / MANIFEST_NAME).exists():
                        self._read_log()  # its last row came before the manifest
                        self.finished = self._open_finished()
                    elif is_gone:
                        self._refuse()
        return self.finished is not None

    def _is_in_place(self) -> bool:
        """Return whether the log that this process reads is still in the work folder."""
        work = self.directory / WORK_NAME
        if self._log is None:
            return work.exists()
        try:
            return os.path.samestat(os.fstat(self._log.number), (work / ARRIVED_NAME).stat())
        except FileNotFoundError:
            return False

    def _refuse(self) -> NoReturn:
        """Raise the error of the builder, or StoreError if it does not come soon."""
        until = time.monotonic() + _GONE_SECONDS
        while self._check_builder is not None and self._check_builder() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        raise self._other()

    def _open_finished(self) -> Cache:
        found = Cache.open(self.directory)
        if found.manifest.parents:  # another command has changed the cache since
            found = Cache.open(self.directory, 1)
        digits = 2 * _IDENTITY_BYTES
        is_known = self._log is not None or self._identities
        is_own = found.manifest.identity[:digits] in self._identities
        if not (is_own if is_known else self._prospect.fits(found.manifest)):
            raise self._other()
        return found

    def _other(self) -> StoreError:
        return StoreError(
            f"{self.directory} was removed, or has another cache now than the one that is read here: create the "
            "dataset again"
        )

    def __getitem__(self, numbers: Numbers) -> Rows:
        while self.finished is None:
            if time.monotonic() - self._seen > _LOOK_SECONDS and self.look():
                continue
            if self._is_here[numbers].all():
                rows: Rows = self._rows[numbers]
                return rows
            if not self.look() and not self._is_here[numbers].all():
                self.ask(numbers)
                self._pause()
        return self.finished.index[numbers]

    def expect(self, owner: object, variants: Sequence[int], windows: Windows) -> None:
        if not self.look():
            self.ask(np.concatenate([*windows(), np.empty(0, np.int64)]), again=True)

    @property
    def is_busy(self) -> bool:
        return self.finished is None

    def network(self) -> NetworkUse | None:
        return None

    def ask(self, numbers: Numbers, *, again: bool = False) -> None:
        """Ask the builder to make records in this order; with `again`, also records that were asked for before."""
        asked = numbers[~self._is_here[numbers]]
        asked = asked if again else asked[~self._is_asked[asked]]
        if len(asked):
            self._is_asked[asked] = True
            positions = asked % self._samples
            _, first = np.unique(positions, return_index=True)
            try:
                ask_for(self.directory / WORK_NAME, positions[np.sort(first)])
            except OSError as error:
                raise StoreError(
                    f"a request for records cannot be written into {self.directory}: {error}. Check the disk and the "
                    "permissions"
                ) from error

    def wait(self) -> Cache:
        while self.finished is None:
            if not self.look():
                self._pause()
        return self.finished

    def file(self, number: int) -> OpenFile | None:
        """Return the open file for a value of the column `shard`; None for one that is not open here, such as a
        shard.
        """
        return self._files.get(number)

    def name(self, number: int) -> str:
        """Return the path of the file for a value of the column `shard`, relative to the cache's folder."""
        return f"{WORK_NAME}/{spool_name(number)}" if number & SPOOL_BIT else self._prospect.shards[number]

    def _pause(self) -> None:
        """Wait a moment."""
        if process.is_leaving():
            raise StoreError(f"{self.directory}: waiting for records was given up, because the command was interrupted")
        now = time.monotonic()
        if now - self._checked > _CHECK_SECONDS:
            self._is_own = self._check_builder is not None and self._check_builder()
            self._checked = now  # not set after an error, so that the next waiting thread gets the error, too
        if not self._is_own and now - self._looked > _LOOK_SECONDS:
            self._looked = now
            if lock.is_held(self.directory / WORK_NAME / LOCK_NAME):
                self._last_built = now
            elif failure := self._failure():
                raise BuildError(failure)
            elif not self._last_built:
                self._last_built = now
            elif now - self._last_built > _PATIENCE_SECONDS and not self.look():
                raise BuildError(
                    f"no process builds {self.directory} any more, and this cache is not finished: create the dataset "
                    "again, or run `tpucache warmup`, to continue the build"
                )
        time.sleep(_POLL_SECONDS)

    def _failure(self) -> str:
        try:
            return read_file(self.directory / WORK_NAME / FAILURE_NAME, 1 << 20).decode(errors="replace")[:_LONGEST]
        except OSError:
            return ""

    def _read_log(self) -> None:
        if self._log is None:
            try:
                log = OpenFile(self.directory / WORK_NAME / ARRIVED_NAME)
            except FileNotFoundError:
                return
            first = machine.pread(log.number, ARRIVED_DTYPE.itemsize, 0)
            if len(first) < ARRIVED_DTYPE.itemsize:  # the build has just begun
                return
            if first != identity_row(BUILD_ROW, self._prospect.build).tobytes():
                raise self._other()
            self._log = log
        found: list[npt.NDArray[Any]] = []
        at = self._at
        while data := machine.pread(self._log.number, _READ_ROWS * ARRIVED_DTYPE.itemsize, at):
            whole = len(data) // ARRIVED_DTYPE.itemsize * ARRIVED_DTYPE.itemsize
            if not whole:
                break
            found.append(np.frombuffer(data[:whole], ARRIVED_DTYPE))
            at += whole
        if found:  # all at once, because a later row may replace an earlier one
            new = np.concatenate(found)
            self._identities |= {row.tobytes()[8:].hex() for row in new[new["row"] == MANIFEST_ROW]}
            self._take(new[new["row"] < self._count])
        self._at = at

    def _take(self, new: npt.NDArray[Any]) -> None:
        for number in np.unique(new["file"][new["length"] > 0]).tolist():
            if number not in self._files:
                try:
                    self._files[number] = OpenFile(self.directory / self.name(number))
                except (FileNotFoundError, IndexError):  # the build has finished meanwhile, or the log is damaged
                    new = new[(new["file"] != number) | (new["length"] == 0)]
        at = new["row"].astype(np.int64)
        for name, column in (("offset", "offset"), ("length", "length"), ("crc32", "crc32"), ("shard", "file")):
            self._rows[name][at] = new[column]
        self.is_proven[at] = False
        self._is_here[at] = new["length"] > 0


class GrowingReader(ShardReader):
    """Reads records of a growing cache, and its shards after the build.

    During the build, each record is compared with its checksum when this process reads it for the first time.
    """

    def __init__(self, index: GrowingIndex) -> None:
        super().__init__(index.directory, ())
        self._index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return GrowingReader, (self._index,)

    @property
    def arriving(self) -> GrowingIndex | None:
        return None if self._index.finished is not None else self._index

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        """The shards; none before the cache is finished."""
        if self._index.finished is not None:
            self._take_shards(self._index.finished)
        return self._shards

    def file(self, shard: int) -> OpenFile:
        found = self._index.file(shard)
        if found is not None:
            self._distrusted.add(shard)
            return found
        self._take_shards(self._index.wait())
        return super().file(shard)

    def path(self, shard: int) -> Path:
        return self._directory / self._index.name(shard)

    def _are_proven(self, rows: Rows, shards: list[int]) -> bool:
        if rows.dtype != _NUMBERED_DTYPE:
            return super()._are_proven(rows, shards)
        return bool(self._index.is_proven[rows["row"]].all())

    def _prove(self, rows: Rows, shards: list[int], views: Sequence[Sequence[memoryview]]) -> None:
        if rows.dtype != _NUMBERED_DTYPE:
            super()._prove(rows, shards, views)
            return
        is_proven = self._index.is_proven
        for at in np.flatnonzero(~is_proven[rows["row"]]).tolist():
            self.check(rows[at], functools.reduce(lambda crc, view: zlib.crc32(view, crc), views[at], 0))
        is_proven[rows["row"]] = True

    def _take_shards(self, finished: Cache) -> None:
        if not self._shards:
            self._sizes = np.array([entry.bytes for entry in finished.manifest.shards], np.uint64)
            self._shards = finished.manifest.shards


class GrowingCache(Cache):
    """A cache that is read while a process builds it."""

    is_growing = may_be_growing = True

    def __init__(self, directory: Path, prospect: Prospect, check_builder: Callable[[], bool] | None = None) -> None:
        """Store what is known of the cache.

        `check_builder` raises the error of the builder; None if this process did not start the build. It returns False
        in a fork of the process that started it.
        """
        self._growing_index = GrowingIndex(directory, prospect, check_builder)
        super().__init__(directory, GrowingManifest(prospect, self._finished_manifest))
        self._growing_reader = GrowingReader(self._growing_index)
        self._table = GrowingTable(directory, prospect.table)

    @property
    def index(self) -> RecordIndex:
        return self._growing_index

    @property
    def reader(self) -> ShardReader:
        return self._growing_reader

    @property
    def samples(self) -> SampleTable:
        return self._table

    @property
    def is_finished(self) -> bool:
        return self._growing_index.look()

    @property
    def built(self) -> float:
        return self._growing_index.share

    def wait(self) -> Cache:
        return self._growing_index.wait()

    def _finished_manifest(self) -> Manifest:
        return self._growing_index.wait().manifest
