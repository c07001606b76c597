"""RemoteReader: reads records of a cache at a URL by their index rows, once they are here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from tpucache import system
from tpucache.store.cache import Cache
from tpucache.store.files import ThreadLock
from tpucache.store.index import Numbers, Rows
from tpucache.store.manifest import ShardEntry
from tpucache.store.reader import NetworkUse, ShardReader
from tpucache.store.remote.fetching import Fetcher, Flight
from tpucache.store.remote.pieces import Pieces

_COUNT_EVERY: Final = 64  # reads without anything missing, after which it is looked which shards are here
_MOST_PARTS: Final = 1000  # that Linux writes in one call


class RemoteReader(ShardReader):
    """Reads records out of sparse files, each after it was fetched and compared with its checksum.

    Nothing else reads these files: what of them is missing would read as zeros. Threads may share one. A process that
    is forked, or a pickled copy, fetches by itself.
    """

    is_whole = False

    def __init__(self, cache: Cache, pieces: Pieces, make: Callable[[], Fetcher]) -> None:
        """Take a cache in the folder of its sparse files; `make` makes what fetches into it, once in each process."""
        super().__init__(cache.directory, cache.manifest.shards)
        self._cache, self._pieces, self._make = cache, pieces, make
        self._fetcher: Fetcher | None = None
        self._making = ThreadLock()
        self._numbers = {entry.name: number for number, entry in enumerate(cache.manifest.shards)}
        self._whole = np.zeros(len(self._numbers), np.bool_)  # shards of which all is here, and stays
        self._reads = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._cache, "reader")

    @property
    def fetcher(self) -> Fetcher:
        """What fetches for this process."""
        with self._making:
            if self._fetcher is None or self._fetcher.process != os.getpid():
                self._fetcher = self._make()
                self._whole[:] = False
            return self._fetcher

    def network(self, bands: int) -> NetworkUse:
        """Return what this process has read so far, and what is kept of the first bands of frequencies."""
        return self.fetcher.use(bands)

    def has(self, shards: Sequence[ShardEntry]) -> bool:
        """Return whether all records of some shards are here, and stay: nothing of them is looked up from then on."""
        numbers = np.array([self._numbers[entry.name] for entry in shards], np.int64)
        self._look_at(numbers)
        return bool(self._whole[numbers].all())

    @property
    def is_at_start(self) -> bool:
        """Whether nobody has asked yet for the first records of what was expected."""
        return self._fetcher is not None and self._fetcher.is_at_start

    @property
    def is_busy(self) -> bool:
        """Whether records come onto the disk as fast as they are read, so that the processor has enough to do."""
        return self._fetcher is not None and self._fetcher.is_busy

    def close(self) -> None:
        """Close the files, and end what fetches."""
        super().close()
        if self._fetcher is not None and self._fetcher.process == os.getpid():
            self._fetcher.close()
        self._fetcher = None

    def expect(
        self, owner: object, windows: Iterator[Rows], further: Callable[[], Iterator[Rows]] | None = None
    ) -> None:
        """Fetch what will be read, in its order, ahead of reading; see `Fetcher.expect`."""
        self.fetcher.expect(owner, windows, further)

    def fetch_first(self, rows: Rows) -> None:
        """Fetch records that are read now before all else, if they are the first of what was expected."""
        if not self._are_here(rows):
            numbers, pieces = self._pieces.of(rows)
            self.fetcher.fetch_first(numbers, pieces, self._cache.index[numbers])

    def hint(self, rows: Rows) -> None:
        """Do nothing: what will be read is expected."""

    def is_in_memory(self, shard: int, offset: int) -> bool:
        """Return False: it may have to be fetched."""
        return False

    def read_by(self, rows: Rows, read: Callable[[Numbers, Rows], int]) -> int:
        """Read records in another way; each was compared with its checksum when it came."""
        with self._opened(rows) as (descriptors, places):
            return read(descriptors, places)

    @contextlib.contextmanager
    def _opened(self, rows: Rows) -> Iterator[tuple[Numbers, Rows]]:
        """Wait until records are here; give each one's descriptor and place, in its shard's file or in memory."""
        if self._are_here(rows):
            with super()._opened(rows) as opened:
                yield opened
            return
        numbers, pieces = self._pieces.of(rows)
        with self.fetcher.pinned(pieces), self._fetched(rows, numbers, pieces) as opened:
            yield opened

    @contextlib.contextmanager
    def _fetched(self, rows: Rows, numbers: Numbers, pieces: Numbers) -> Iterator[tuple[Numbers, Rows]]:
        flights = self.fetcher.get(numbers, pieces, self._cache.index[numbers])
        self._note(are_here=not flights)
        if not flights:
            with super()._opened(rows) as opened:
                yield opened
            return
        descriptors, places = np.empty(len(rows), np.int64), rows.copy()
        kept = np.array([at for at in range(len(rows)) if at not in flights], np.int64)
        with super()._opened(rows[kept]) as (own, _), _gathered(rows, flights) as (number, offsets):
            descriptors[kept] = own
            for at, offset in offsets.items():
                descriptors[at] = number
                places["offset"][at] = offset
            yield descriptors, places

    def _are_here(self, rows: Rows) -> bool:
        """Return whether all records of the shards are here that some rows are of."""
        return bool(self._whole[rows["shard"]].all())

    def _note(self, *, are_here: bool) -> None:
        """Look now and then which whole shards are here, of which nothing is looked up any more.

        An epoch that is planned looks when it begins; within it what it needs is counted.
        """
        self._reads += 1
        if are_here and self._reads % _COUNT_EVERY == 0 and not self.fetcher.follows_a_plan:
            self._look_at(np.arange(len(self._whole)))

    def _look_at(self, shards: Numbers) -> None:
        """Note which of some shards are here as a whole."""
        for shard in shards[~self._whole[shards]].tolist():
            self._whole[shard] = self.fetcher.settle(shard)


@contextlib.contextmanager
def _gathered(rows: Rows, flights: dict[int, Flight]) -> Iterator[tuple[int, dict[int, int]]]:
    """Write records that are in memory into a file there; give its descriptor, and where each of them begins."""
    number = system.open_memory_file()
    try:
        parts, offsets, end = [], dict[int, int](), 0
        for at, flight in flights.items():
            start = int(rows["offset"][at]) - flight.run.start
            parts.append(flight.bytes(start, start + int(rows["length"][at])))
            offsets[at] = end
            end += len(parts[-1])
        for first in range(0, len(parts), _MOST_PARTS):
            some = parts[first : first + _MOST_PARTS]
            if os.writev(number, some) != sum(map(len, some)):
                raise OSError("too little memory")
        yield number, offsets
    finally:
        os.close(number)
