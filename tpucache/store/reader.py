"""ShardReader: reads records with `pread` by their index rows. It never maps a shard and never imports lmdb.

Reading a mapped file that was truncated kills the process with SIGBUS; `pread` raises an exception.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tpucache import machine
from tpucache.errors import DamageError, FormatError, StoreError
from tpucache.store.files import OpenFile, ThreadLock, is_late
from tpucache.store.manifest import FileEntry, ShardEntry

if TYPE_CHECKING:
    from tpucache.store.ahead import Lateness

#: A function without arguments. It returns an iterator over the index row numbers of the records that a loader will
#: read, in reading order: int64 arrays of a few thousand numbers each. One such array is called a window.
Windows = Callable[[], Iterator[npt.NDArray[np.int64]]]


class Arriving(Protocol):
    """Records of a cache that arrive while the cache is read.

    The reader waits for each record that it reads. So calling these methods is optional: they announce the order in
    which records are needed. Threads may share one object.
    """

    def expect(self, owner: object, variants: Sequence[int], windows: Windows) -> None:
        """Announce the order in which `owner`, such as a loader, will read records; it replaces an earlier order.

        `windows()` yields arrays of index row numbers, in reading order, of records of `variants`. Another thread may
        run it.
        """
        ...

    @property
    def is_busy(self) -> bool:
        """Whether records are being fetched or built right now. Readers should then put off work that can wait."""
        ...

    def network(self) -> NetworkUse | None:
        """Return the network traffic so far; None if the records do not come over a network."""
        ...


class NetworkUse(NamedTuple):
    """The network traffic of one cache in this process so far, and how much of the cache is on this machine's disk.

    `bytes` were read from the URL by `requests` successful requests; `failures` failed. `needed_bytes` is the size of
    the records that readers asked for while not all are on the disk. `rate`, in bytes per second, counts only the time
    in which a request ran, and `best_rate` is that of the best second. `waited` is the seconds that readers waited,
    added up over all threads. Of `total_bytes`, about `kept_bytes` are on the disk.
    """

    bytes: int
    needed_bytes: int
    requests: int
    failures: int
    rate: float
    best_rate: float
    waited: float
    kept_bytes: int
    total_bytes: int

    @property
    def progress(self) -> str:
        """How much of the cache is on disk, as text for a progress bar; "" once all of it is."""
        if self.kept_bytes >= self.total_bytes:
            return ""
        unit, name = (1e9, "GB") if self.total_bytes >= 1e9 else (1e6, "MB")
        return f"cached {self.kept_bytes / unit:,.1f} of {self.total_bytes / unit:,.1f} {name}"


MAX_OPEN: Final = 256
_PROBES: Final = 16
_NEAR_BYTES: Final = np.uint64(64 << 10)
_REMEDY: Final = "Run `tpucache verify {directory}`, or copy the cache again."

Rows = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]


class ShardReader:
    """Reads records of a cache's shards by their index rows. Threads may share a ShardReader.

    A shard is opened on first use, and its size compared with the manifest. At most 256 stay open. Pickled and forked
    copies are safe: `pread` does not use the shared file position.
    """

    def __init__(
        self,
        directory: str | Path,
        shards: Sequence[ShardEntry],
        check: Callable[[FileEntry], None] | None = None,
        latency: float = 0.0,
    ) -> None:
        self._check = check
        self._latency = latency
        self._directory = Path(directory)
        self._shards = tuple(shards)
        self._sizes = np.array([entry.bytes for entry in self._shards], np.uint64)
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        self._proven: set[int] = set()  # open shards; one record of each was compared with its checksum
        self._distrusted: set[int] = set()  # shards whose records are all compared with checksums
        self._lateness: Lateness | None = None  # of opening a shard
        self._lock = ThreadLock()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_directory": self._directory,
            "_shards": self._shards,
            "_check": self._check,
            "_latency": self._latency,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # With a new lock and no open files.
        self.__init__(*map(state.__getitem__, ("_directory", "_shards", "_check", "_latency")))  # type: ignore[misc]

    @property
    def arriving(self) -> Arriving | None:
        """What a loader announces its records to, while some are still fetched or built; None if all are here."""
        return None

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        return self._shards

    @property
    def is_late(self) -> bool:
        """Whether the storage took long to answer when the cache was opened, as a network mount does."""
        return is_late(self._latency)

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def read(self, row: Rows) -> bytearray:
        record = bytearray(int(row["length"]))
        self.scatter(np.atleast_1d(row), [[memoryview(record)]])
        return record

    def scatter(
        self,
        rows: Rows,
        views: Sequence[Sequence[memoryview]],
        *,
        are_whole: bool = True,
        read: Callable[[Numbers, Rows], int] | None = None,
    ) -> None:
        """Read the record of each index row in `rows` into the buffers in `views`, by one `preadv` per record.

        views[i] has the buffers for rows[i], together exactly of the row's length. The first record that is read from a
        shard is compared with its checksum, because a file of another cache may have the same name and size; after
        `distrust`, every record of the shard is. Parts of records (`are_whole=False`) are not compared. `read` is an
        optional faster function that fills the same buffers: it takes the rows' file descriptors, int64 (n,), and the
        rows, and returns the number of records before the first that it could not read.
        """
        shards = rows["shard"].tolist()
        if len(set(shards)) > MAX_OPEN:
            self._scatter_in_groups(rows, views, are_whole=are_whole)
            return
        with self._opened(rows) as (descriptors, places):
            done = 0 if read is None else read(descriptors, places)
            if done < len(rows):
                self._read_each(places[done:], views[done:], descriptors[done:])
        if are_whole and (self._distrusted or not self._proven.issuperset(shards)):
            self._prove(rows, shards, views)

    def read_by(self, rows: Rows, read: Callable[[Numbers, Rows], int]) -> int:
        shards = rows["shard"].tolist()
        if len(set(shards)) > MAX_OPEN:
            return 0
        with self._opened(rows) as (descriptors, places):
            return read(descriptors, places) if self._are_proven(rows, shards) else 0

    def _are_proven(self, rows: Rows, shards: list[int]) -> bool:
        """Return whether all these records may be read without comparing them with their checksums."""
        return self._proven.issuperset(shards) and self._distrusted.isdisjoint(shards)

    def _opened(self, rows: Rows) -> contextlib.AbstractContextManager[tuple[Numbers, Rows]]:
        """Open the files of some records. The context manager returns file descriptors, int64 (n,), and rows."""
        return self._open_files(rows)

    def _open_files(self, rows: Rows) -> OpenFiles:
        shards = rows["shard"].tolist()
        files = {shard: self.file(shard) for shard in set(shards)}
        numbers = {shard: file.number for shard, file in files.items()}
        return OpenFiles(np.fromiter(map(numbers.__getitem__, shards), np.int64, len(shards)), rows, files)

    def _read_each(self, rows: Rows, views: Sequence[Sequence[memoryview]], descriptors: Numbers) -> None:
        preadv = machine.preadv
        shard = -1
        try:
            places = rows["shard"].tolist(), rows["offset"].tolist(), rows["length"].tolist()
            for number, shard, offset, length, buffers in zip(descriptors.tolist(), *places, views, strict=True):
                if preadv(number, buffers, offset) != length:
                    raise self._short(shard, offset, length)
        except (OSError, OverflowError) as error:
            raise DamageError(f"Shard {self.path(shard).name} cannot be read: {error}. {self._remedy()}") from error

    def _prove(self, rows: Rows, shards: list[int], views: Sequence[Sequence[memoryview]]) -> None:
        distrusted = self._distrusted.intersection(shards)
        places = [at for at, shard in enumerate(shards) if shard in distrusted] if distrusted else []
        new = set(shards) - self._proven
        for at in (*places, *map(shards.index, new - distrusted)):
            self.check(rows[at], functools.reduce(lambda crc, view: zlib.crc32(view, crc), views[at], 0))
        self._proven.update(new - distrusted)

    def distrust(self, shard: int) -> None:
        """From now on, compare every record of a shard with its checksum: another program may write into its file."""
        self._distrusted.add(shard)

    def path(self, shard: int) -> Path:
        return self._directory / self._shards[shard].name

    def check(self, row: Rows, crc32: int) -> None:
        if crc32 != row["crc32"]:
            raise DamageError(
                f"Shard {self.path(int(row['shard'])).name} in {self._directory} holds other records than the index "
                f"lists: the shard is damaged, or belongs to another cache or variant. {self._remedy()}"
            )

    def check_inside(self, rows: Rows) -> None:
        sizes = self._sizes[rows["shard"]]
        outside = np.flatnonzero((rows["offset"] > sizes) | (rows["length"] > sizes - rows["offset"]))
        if len(outside):
            row = rows[outside[0]]
            raise self._short(int(row["shard"]), int(row["offset"]), int(row["length"]))

    def _scatter_in_groups(self, rows: Rows, views: Sequence[Sequence[memoryview]], *, are_whole: bool) -> None:
        """Read rows of more shards than may be open at once: one group of shards after another."""
        shards = np.unique(rows["shard"])
        for start in range(0, len(shards), MAX_OPEN):
            chosen = np.flatnonzero(np.isin(rows["shard"], shards[start : start + MAX_OPEN])).tolist()
            self.scatter(rows[chosen], [views[at] for at in chosen], are_whole=are_whole)

    def hint(self, rows: Rows) -> None:
        """Ask the kernel to read the records of these index rows ahead, neighbouring ones together. Errors are ignored.

        If the storage is fast, this does nothing if some of the records are all in the page cache. On slow storage it
        always asks, because each record that is not in the page cache costs a long wait.
        """
        if not len(rows):
            return
        try:
            self.open_all(np.unique(rows["shard"]).tolist())
        except StoreError:
            return  # reading the record will raise a clear error
        if not self.is_late and self.are_in_memory(rows[:: max(1, len(rows) // _PROBES)]):
            return
        for shard, start, stop in _extents(rows):
            try:
                machine.read_ahead(self.file(shard).number, start, stop - start)
            except (OSError, OverflowError, StoreError):
                return  # reading the record will raise a clear error

    def are_in_memory(self, rows: Rows) -> bool:
        """Return whether the first byte of every one of these records is in the page cache."""
        return all(self.is_in_memory(int(row["shard"]), int(row["offset"])) for row in rows)

    def is_in_memory(self, shard: int, offset: int) -> bool:
        """Return whether a byte of a shard is in the page cache; False if that is unknown."""
        try:
            return machine.is_in_page_cache(self.file(shard).number, offset)
        except (OSError, OverflowError, StoreError):
            return False

    def file(self, shard: int) -> OpenFile:
        with self._lock:
            descriptor = self._open.get(shard)
            if descriptor is not None:
                self._open.move_to_end(shard)
                return descriptor
        opened = self._open_shard(shard)  # without the lock: on slow storage, threads open files at the same time
        with self._lock:
            descriptor = self._open.setdefault(shard, opened)
            if descriptor is opened:
                self._proven.discard(shard)
                if len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)
            return descriptor

    def open_all(self, shards: Iterable[int]) -> None:
        """Open the first 256 of `shards` that are not open yet, several in parallel if the storage is slow."""
        missing = [shard for shard in shards if shard not in self._open][:MAX_OPEN]
        if len(missing) < 2 or self.arriving is not None:
            return
        from tpucache.store.ahead import Lateness, ReadAhead  # not needed to open a cache

        self._lateness = self._lateness or Lateness(self._latency)
        with ReadAhead(self.file, missing, lambda shard: 0, self._lateness) as opening:
            for shard in missing:
                opening.load(shard)

    def _open_shard(self, shard: int) -> OpenFile:
        if shard >= len(self._shards):
            raise FormatError(
                f"the index of {self._directory} points at shard {shard} of {len(self._shards)} shards, numbered from "
                f"0. {self._remedy()}"
            )
        entry = self._shards[shard]
        try:
            descriptor = OpenFile(self._directory / entry.name)
            size = os.fstat(descriptor.number).st_size
        except OSError as error:
            raise DamageError(
                f"Shard {entry.name} cannot be opened in {self._directory}: {error.strerror}. {self._remedy()}"
            ) from error
        if self._check is not None:
            self._check(entry)
        if size != entry.bytes:
            raise DamageError(
                f"Shard {entry.name} is {size:,} bytes, the manifest says {entry.bytes:,}: "
                f"the copy was cut short or replaced. {self._remedy()}"
            )
        return descriptor

    def _short(self, shard: int, offset: int, length: int) -> DamageError:
        return DamageError(
            f"Shard {self.path(shard).name} ends before byte {offset + length:,}, or the index is wrong. "
            f"{self._remedy()}"
        )

    def _remedy(self) -> str:
        return _REMEDY.format(directory=self._directory)


class OpenFiles:
    """A context manager that returns the file descriptors and rows of some records, and keeps their files open.

    It is a class, because a generator with `contextmanager` would take longer than reading a single sample.
    """

    __slots__ = ("_descriptors", "_rows", "files")

    def __init__(self, descriptors: Numbers, rows: Rows, files: dict[int, OpenFile]) -> None:
        self._descriptors, self._rows, self.files = descriptors, rows, files

    def __enter__(self) -> tuple[Numbers, Rows]:
        return self._descriptors, self._rows

    def __exit__(self, *_: object) -> None:
        """Do nothing: files close when nothing refers to them any more."""


def _extents(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Yield (shard, start, stop) of the byte ranges that the records of these rows cover."""
    if not len(rows):
        return
    rows = rows[np.lexsort((rows["offset"], rows["shard"]))]
    starts, stops = rows["offset"], rows["offset"] + rows["length"]
    apart = (rows["shard"][1:] != rows["shard"][:-1]) | (starts[1:] > stops[:-1] + _NEAR_BYTES)
    first = np.flatnonzero(np.concatenate([[True], apart]))
    last = np.concatenate([first[1:] - 1, [len(rows) - 1]])
    yield from zip(rows["shard"][first].tolist(), starts[first].tolist(), stops[last].tolist(), strict=True)
