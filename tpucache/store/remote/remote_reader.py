"""RemoteReader: reads records of a cache at a URL by their index rows. It waits until the records are fetched."""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from tpucache import machine
from tpucache.errors import DamageError, StoreError
from tpucache.store.arriving import NetworkUse, Windows
from tpucache.store.cache import Cache
from tpucache.store.files import OpenFile, ThreadLock
from tpucache.store.index import Numbers, Rows
from tpucache.store.reader import MAX_OPEN, ShardReader
from tpucache.store.remote.fetching import Fetcher
from tpucache.store.remote.local import Moment
from tpucache.store.remote.pieces import Pieces
from tpucache.store.remote.requests import FetchRequest, NeededRecords

_COUNT_EVERY: Final = 64  # reads without a missing record until the reader checks which shards are complete
_MOST_PARTS: Final = 1000  # buffers per call of `writev`; Linux allows 1024
_TRIES: Final = 5  # attempts to read a file that another program keeps changing

_LAST_SECONDS: Final = 0.5  # how long `close` waits for the fetcher's threads

T = TypeVar("T")


class RemoteReader(ShardReader):
    """Reads records from sparse files after they were fetched and compared with their checksums.

    No other code may read these files: missing records read as zeros, and other programs may change the files. Threads
    may share a RemoteReader. Forked and pickled copies have a fetcher of their own.
    """

    def __init__(self, cache: Cache, make: Callable[[Pieces], Fetcher]) -> None:
        """Store the cache's tables. `make` makes the fetcher, once in each process."""
        super().__init__(cache.directory, cache.manifest.shards)
        self._cache, self._pieces, self._make = cache, Pieces(cache), make
        self._fetcher: Fetcher | None = None
        self._making = ThreadLock()
        shards = cache.manifest.shards
        self._variants = np.array([entry.variant for entry in shards], np.int64)
        self._whole = np.zeros(len(shards), np.bool_)  # shards whose records the local copy has and will not remove
        self._is_proven = np.zeros(len(shards), np.bool_)  # shards whose records are all proven (`LocalCopy`)
        self._since: dict[int, Moment] = {}  # the status of each proven shard's file when it was proven
        self._reads = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteReader, (self._cache, self._make)

    def __del__(self) -> None:
        if hasattr(self, "_reads"):
            self._end()

    @property
    def fetcher(self) -> Fetcher:
        """The Fetcher of this process, which is made on first use."""
        with self._making:
            if self._fetcher is None or self._fetcher.process != os.getpid():
                self._fetcher = self._make(self._pieces)
                self._whole[:] = self._is_proven[:] = False
                self._since.clear()
            return self._fetcher

    def network(self) -> NetworkUse:
        """Return this process's network traffic so far, and how much of the cache is on the disk.

        The bytes on the disk are estimated from the number of records.
        """
        fetcher, records = self.fetcher, self._cache.manifest.records
        total = sum(entry.bytes for entry in self._shards)
        return fetcher.statistics.use(int(total * fetcher.local.count(records) / max(1, records)), total)

    @property
    def arriving(self) -> RemoteReader:
        """This reader, to which loaders announce the records that they will read."""
        return self

    @property
    def is_busy(self) -> bool:
        """Whether records are being fetched to the disk while readers wait less than half of the time."""
        return self._fetcher is not None and self._fetcher.is_busy

    def expect(self, owner: object, variants: Sequence[int], windows: Windows, further: Windows | None = None) -> None:
        """Fetch records ahead, in the order in which `owner` will read them. Replaces the owner's earlier order.

        `windows()` yields arrays of the records' index row numbers. `further()` yields the same arrays again, followed
        by those of later epochs. Does nothing if the disk has all records of `variants`.
        """
        shards = np.flatnonzero(np.isin(self._variants, variants))
        self._look_at(shards)
        if self._whole[shards].all():
            return
        index = self._cache.index

        def rows(windows: Windows) -> Iterator[Rows]:
            return (index[window] for window in windows())

        self.fetcher.expect(owner, rows(windows), None if further is None else functools.partial(rows, further))

    def prioritise(self, numbers: Numbers) -> None:
        """If a plan begins with the records of these index row numbers, fetch exactly these records first, and wait."""
        if self._fetcher is None or not self._fetcher.is_at_start:
            return
        rows = self._cache.index[numbers]
        if not self._are_here(rows):
            self._fetcher.fetch_first(NeededRecords(numbers, self._pieces.of(rows)[1], rows))

    def close(self) -> None:
        """Close the files, and end the fetcher."""
        super().close()
        self._end()

    def _end(self) -> None:
        if self._fetcher is not None and self._fetcher.process == os.getpid():
            self._fetcher.close(_LAST_SECONDS)
        self._fetcher = None

    def file(self, shard: int) -> OpenFile:
        """Return a shard's open file. Raises OSError, StoreError."""
        return self.fetcher.local.file(shard)

    def scatter(
        self,
        rows: Rows,
        views: Sequence[Sequence[memoryview]],
        *,
        are_whole: bool = True,
        read: Callable[[Numbers, Rows], int] | None = None,
    ) -> None:
        """Read the bytes of each index row in `rows` into the buffers in `views`, as `ShardReader.scatter` does.

        Each record is compared with its checksum before its first use, even if only a part of the record is read.
        """

        def call() -> None:
            is_done = are_whole and not self._is_proven[rows["shard"]].all() and self._scatter_whole(rows, views, read)
            if not is_done:
                super(RemoteReader, self).scatter(rows, views, are_whole=False, read=read)

        self._read_unchanged(call)

    def _scatter_whole(
        self,
        rows: Rows,
        views: Sequence[Sequence[memoryview]],
        read: Callable[[Numbers, Rows], int] | None,
    ) -> bool:
        """Read whole records from the disk into `views`, then compare those not compared before with their checksums.

        Comparing in `views` saves a copy of each record; it needs whole records. Returns False if this cannot be done:
        some records are in memory, the disk is full, a file is too short, or there are too many files. Raises
        _ChangedError for wrong records; the next attempt fetches them again.
        """
        shards, local = np.unique(rows["shard"]), self.fetcher.local
        if local.is_full or len(shards) > MAX_OPEN:
            return False
        numbers, pieces = self._pieces.of(rows)
        with contextlib.ExitStack() as stack:
            if not self._are_here(rows):
                stack.enter_context(local.pinned(pieces))
                if self.fetcher.get(NeededRecords(numbers, pieces, rows)):
                    return False
                self._note(are_here=True)
            is_proven, since, before = np.zeros(len(rows), np.bool_), dict[int, Moment](), dict[int, Moment]()
            for shard in shards.tolist():
                before[shard], own = local.moment(shard), np.flatnonzero(rows["shard"] == shard)
                is_proven[own], moment = local.proven_since(shard, numbers[own])
                if moment is not None and is_proven[own].any():
                    since[shard] = moment
            opened = self._open_files(rows)
            with opened as (descriptors, places):
                done = 0 if read is None else read(descriptors, places)
                try:
                    self._read_each(places[done:], views[done:], descriptors[done:])
                except DamageError:
                    return False
            changed = [shard for shard, moment in since.items() if Moment.of(opened.files[shard]) != moment]
            is_right = is_proven & ~np.isin(rows["shard"], changed)
            for at in np.flatnonzero(~is_right).tolist():
                crc = functools.reduce(lambda crc, view: zlib.crc32(view, crc), views[at], 0)
                is_right[at] = crc == rows["crc32"][at]
            for shard in shards.tolist():
                own = np.flatnonzero((rows["shard"] == shard) & ~(is_proven & is_right))
                if len(own):
                    local.note_compared(shard, numbers[own], rows[own], is_right[own], before[shard])
        if not is_right.all():
            wrong = rows["shard"][~is_right]
            self._whole[wrong] = self._is_proven[wrong] = False
            raise _ChangedError
        return True

    def read_by(self, rows: Rows, read: Callable[[Numbers, Rows], int]) -> int:
        """Read records by calling the function `read`, and return how many records it has read.

        `ShardReader.scatter` explains `read`. Returns 0 without calling it if the records are in more than 256 shards,
        or if one of these shards is not known to have only records that match their checksums. If a file changes
        meanwhile, `read` is called again. Raises StoreError for a file that cannot be opened, and after five attempts.
        """
        if not self._is_proven[rows["shard"]].all() or len(np.unique(rows["shard"])) > MAX_OPEN:
            return 0

        def call() -> int:
            with self._opened(rows) as (descriptors, places):
                return read(descriptors, places)

        return self._read_unchanged(call)

    def _read_unchanged(self, read: Callable[[], T]) -> T:
        """Call `read`, and call it again if a file changed meanwhile. Raises StoreError after five attempts."""
        for _ in range(_TRIES):
            with contextlib.suppress(_ChangedError):
                return read()
        raise StoreError(
            f"the files in {self._directory} are changed by another program while they are read: end that program, or "
            "give another folder as cache_dir"
        )

    @contextlib.contextmanager
    def _opened(self, rows: Rows) -> Iterator[tuple[Numbers, Rows]]:
        """Wait until records are on this machine. The context returns each record's file descriptor and its row.

        The descriptor is that of a shard's file, or that of a file in memory; the row has the record's offset and
        length in this file. At the end of the context, _ChangedError is raised if a file changed meanwhile: then the
        data that were read may be wrong.
        """
        if self._is_proven[rows["shard"]].all():
            with self._unchanged(rows, self._since) as opened:
                yield opened
            return
        numbers, pieces = self._pieces.of(rows)
        if self._are_here(rows):
            with self._proven_or_in_memory(rows, numbers, {}) as opened:
                yield opened
            return
        with self.fetcher.local.pinned(pieces):
            fetched = self.fetcher.get(NeededRecords(numbers, pieces, self._cache.index[numbers]))
            self._note(are_here=not fetched)
            with self._proven_or_in_memory(rows, numbers, fetched) as opened:
                yield opened

    @contextlib.contextmanager
    def _unchanged(self, rows: Rows, since: Mapping[int, Moment]) -> Iterator[tuple[Numbers, Rows]]:
        """Open the files of proven records. The context returns each record's file descriptor and its row.

        Proven records were compared with their checksums. `since` has the status of each shard's file at that time; if
        a file has another status when the context ends, _ChangedError is raised.
        """
        since = dict(since)
        opened = self._open_files(rows)
        try:
            with opened as found:
                yield found
        finally:
            changed = [shard for shard, file in opened.files.items() if since.get(shard) != Moment.of(file)]
            if changed:
                self._is_proven[changed] = False
                raise _ChangedError

    @contextlib.contextmanager
    def _proven_or_in_memory(
        self, rows: Rows, numbers: Numbers, fetched: Mapping[int, FetchRequest]
    ) -> Iterator[tuple[Numbers, Rows]]:
        """Return a context with each record's file descriptor and its row, as `_opened` does.

        Proven records (see `LocalCopy.proven_since`) are in their shards' files; all others are put into a file in
        memory. `numbers` has the index row numbers of `rows`, and `fetched` the requests that hold records in memory,
        by their positions in `rows`.
        """
        local, since, found = self.fetcher.local, dict[int, Moment](), dict[int, memoryview]()
        for at, request in fetched.items():
            start = int(rows["offset"][at]) - request.run.start
            found[at] = request.bytes(start, start + int(rows["length"][at]))
        others = np.array([at for at in range(len(rows)) if at not in fetched], np.int64)
        proven = list[int]()
        for shard in np.unique(rows["shard"][others]).tolist():
            places = others[rows["shard"][others] == shard]
            is_proven, moment = local.proven_since(shard, numbers[places])
            if moment is not None:
                since[shard] = moment
            proven += places[is_proven].tolist()
            if len(places := places[~is_proven]):
                self._read_proven(shard, rows[places], numbers[places], places.tolist(), found)
        if not found:
            with self._unchanged(rows, since) as opened:
                yield opened
            return
        descriptors, places = np.empty(len(rows), np.int64), rows.copy()
        kept = np.array(sorted(proven), np.int64)
        with self._unchanged(rows[kept], since) as (own, _), _in_memory(found) as (number, offsets):
            descriptors[kept] = own
            for at, offset in offsets.items():
                descriptors[at] = number
                places["offset"][at] = offset
            yield descriptors, places

    def _read_proven(
        self, shard: int, rows: Rows, numbers: Numbers, places: list[int], found: dict[int, memoryview]
    ) -> None:
        """Read records of a shard, compare them with their checksums, and add the bytes of `rows` to `found`.

        A row may be a part of a record. `places` has the keys of the rows in `found`. Raises _ChangedError for wrong
        records; the next attempt fetches them again.
        """
        whole = self._cache.index[numbers]
        records = self.fetcher.local.read(shard, numbers, whole)
        starts = (rows["offset"] - whole["offset"]).tolist()
        for at, data, start, length in zip(places, records, starts, rows["length"].tolist(), strict=True):
            if data is None:
                self._whole[shard] = self._is_proven[shard] = False
                raise _ChangedError
            found[at] = memoryview(data)[start : start + length]

    def _are_here(self, rows: Rows) -> bool:
        """Return whether the local copy has all records of the shards to which these rows belong."""
        return bool(self._whole[rows["shard"]].all())

    def _note(self, *, are_here: bool) -> None:
        """After every 64th read, check which shards are complete, so that their records need not be looked up any more.

        `are_here` says whether the records of the last read were all on the disk. If there is a plan, shards are
        checked only when an epoch begins: reads from shards that are known to be complete are missing in the
        statistics.
        """
        self._reads += 1
        if are_here and self._reads % _COUNT_EVERY == 0 and not self.fetcher.follows_a_plan:
            self._look_at(np.arange(len(self._whole)))

    def _look_at(self, shards: Numbers) -> None:
        """Check which of these shards are whole on the disk, and in which all records were compared with checksums."""
        for shard in shards[~self._whole[shards]].tolist():
            self._whole[shard] = self.fetcher.local.stays_whole(shard)
        for shard in shards[self._whole[shards] & ~self._is_proven[shards]].tolist():
            is_proven, moment = self.fetcher.local.proven_since(shard, self._cache.rows_of(self._shards[shard]))
            if moment is not None and is_proven.all():
                self._since[shard] = moment
                self._is_proven[shard] = True


class _ChangedError(Exception):
    """A file changed after its records were compared with their checksums."""


@contextlib.contextmanager
def _in_memory(found: Mapping[int, memoryview]) -> Iterator[tuple[int, dict[int, int]]]:
    """Write records into a file in memory. The context returns its descriptor and the offsets. Raises StoreError."""
    number = machine.open_memory_file()
    try:
        parts, offsets, end = list(found.values()), dict[int, int](), 0
        for at, part in found.items():
            offsets[at] = end
            end += len(part)
        for first in range(0, len(parts), _MOST_PARTS):
            some = parts[first : first + _MOST_PARTS]
            try:
                is_whole = os.writev(number, some) == sum(map(len, some))
                reason = ""
            except OSError as error:
                is_whole, reason = False, f" ({error.strerror})"
            if not is_whole:
                raise StoreError(
                    f"{sum(map(len, parts)):,} bytes of records cannot be held in memory{reason}: end other programs, "
                    "use smaller batches, or raise this process's limits (`ulimit -f unlimited`)"
                )
        yield number, offsets
    finally:
        os.close(number)
