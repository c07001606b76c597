"""RemoteReader: reads records of a cache at a URL by their index rows. It waits until the records are fetched."""

from __future__ import annotations

import functools
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpucache.errors import DamageError, StoreError
from tpucache.store.cache import Cache
from tpucache.store.files import OpenFile, ThreadLock
from tpucache.store.index import Numbers, Rows
from tpucache.store.reader import MAX_OPEN, NetworkUse, OpenFiles, ShardReader, Windows
from tpucache.store.remote.fetch import Fetcher
from tpucache.store.remote.local import Moment, Pieces

_TRIES: Final = 5  # attempts to read a file that another program keeps changing
_LAST_SECONDS: Final = 0.5  # how long `close` waits for the fetcher's threads

Read = Callable[[Numbers, Rows], int]
Views = Sequence[Sequence[memoryview]]


class RemoteReader(ShardReader):
    """Reads records from sparse files after they were fetched and compared with their checksums.

    No other code may read these files: missing records read as zeros, and other programs may change the files. Threads
    may share it. Forked and pickled copies have a fetcher of their own.
    """

    def __init__(self, cache: Cache, make: Callable[[Pieces], Fetcher]) -> None:
        super().__init__(cache.directory, cache.manifest.shards)
        self._cache, self._pieces, self._make = cache, Pieces(cache), make
        self._fetcher: Fetcher | None = None
        self._making = ThreadLock()
        shards = cache.manifest.shards
        self._variants = np.array([entry.variant for entry in shards], np.int64)
        self._is_proven = np.zeros(len(shards), np.bool_)  # shards whose records are all proven (`LocalCopy`)
        self._since: dict[int, Moment] = {}  # the status of each proven shard's file when it was proven

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteReader, (self._cache, self._make)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter exits, threads have ended already, and module globals may be gone.
        if hasattr(self, "_since") and not is_finalizing():
            self._end()

    @property
    def fetcher(self) -> Fetcher:
        """The Fetcher of this process, which is made on first use."""
        with self._making:
            if self._fetcher is None or self._fetcher.process != os.getpid():
                self._fetcher = self._make(self._pieces)
                self._is_proven[:] = False
                self._since.clear()
            return self._fetcher

    def network(self) -> NetworkUse:
        is_here, sizes = self.fetcher.local.has(np.arange(len(self._pieces))), self._pieces.bytes
        return self.fetcher.statistics.use(int(sizes[is_here].sum()), int(sizes.sum()))

    @property
    def arriving(self) -> RemoteReader:
        return self

    @property
    def is_busy(self) -> bool:
        return self._fetcher is not None and self._fetcher.is_busy

    def expect(self, owner: object, variants: Sequence[int], windows: Windows) -> None:
        shards = np.flatnonzero(np.isin(self._variants, variants))
        fetcher, index = self.fetcher, self._cache.index
        is_here = fetcher.local.has(self._pieces.of_shards(shards)).all()
        fetcher.expect(owner, None if is_here else (index[window] for window in windows()))

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        if self._fetcher is not None and self._fetcher.process == os.getpid():
            self._fetcher.close(_LAST_SECONDS)
        self._fetcher = None

    def file(self, shard: int) -> OpenFile:
        return self.fetcher.local.file(shard)

    def scatter(self, rows: Rows, views: Views, *, are_whole: bool = True, read: Read | None = None) -> None:
        shards = np.unique(rows["shard"])
        if len(shards) > MAX_OPEN:
            self._scatter_in_groups(rows, views, are_whole=are_whole)
            return
        for _ in range(_TRIES):
            if self._is_proven[shards].all():
                is_done = self._read_proven(rows, views, read)
            else:
                is_done = self._read_and_compare(rows, views, are_whole, read)
            if is_done:
                return
        raise StoreError(
            f"the files in {self._directory} are changed by another program while they are read: end that program, or "
            "give another folder as cache_dir"
        )

    def read_by(self, rows: Rows, read: Read) -> int:
        if not self._is_proven[rows["shard"]].all() or len(np.unique(rows["shard"])) > MAX_OPEN:
            return 0
        opened = self._open_files(rows)
        with opened as (descriptors, places):
            count = read(descriptors, places)
        return count if self._are_unchanged(opened.files) else 0

    def _read_proven(self, rows: Rows, views: Views, read: Read | None) -> bool:
        """Read records of shards that are proven. Returns False if a file changed meanwhile: the data may be wrong."""
        opened = self._open_files(rows)
        try:
            self._read_all(opened, views, read)
        except DamageError:
            if self._are_unchanged(opened.files):
                raise
            return False
        return self._are_unchanged(opened.files)

    def _read_all(self, opened: OpenFiles, views: Views, read: Read | None) -> None:
        with opened as (descriptors, places):
            done = 0 if read is None else read(descriptors, places)
            self._read_each(places[done:], views[done:], descriptors[done:])

    def _are_unchanged(self, files: Mapping[int, OpenFile]) -> bool:
        """Return whether the files of proven shards have the status that they had when their records were proven."""
        changed = [shard for shard, file in files.items() if self._since.get(shard) != Moment.of(file)]
        self._is_proven[changed] = False
        return not changed

    def _read_and_compare(self, rows: Rows, views: Views, are_whole: bool, read: Read | None) -> bool:
        numbers, pieces = self._pieces.of(rows)
        whole, targets = rows if are_whole else self._cache.index[numbers], views
        in_memory = self.fetcher.get(whole, numbers, pieces)
        if not are_whole:
            targets = [[memoryview(bytearray(length))] for length in whole["length"].tolist()]
        is_kept = np.array([number not in in_memory for number in numbers.tolist()], np.bool_)
        for at in np.flatnonzero(~is_kept).tolist():
            held = in_memory[int(numbers[at])]
            start = int(whole["offset"][at]) - held.start
            _fill(targets[at], held.data[start : start + int(whole["length"][at])])
        kept = np.flatnonzero(is_kept)
        if len(kept):
            own = [targets[at] for at in kept.tolist()]
            is_possible = are_whole and len(kept) == len(rows)
            if not self._read_kept(whole[kept], numbers[kept], pieces[kept], own, read if is_possible else None):
                return False
        if not are_whole:
            starts = (rows["offset"] - whole["offset"]).tolist()
            for view, (record,), start, length in zip(views, targets, starts, rows["length"].tolist(), strict=True):
                _fill(view, record[start : start + length])
        return True

    def _read_kept(self, rows: Rows, numbers: Numbers, pieces: Numbers, views: Views, read: Read | None) -> bool:
        """Read whole records from the disk, and compare those not proven with their checksums."""
        local, of, is_proven = self.fetcher.local, rows["shard"].astype(np.int64), np.zeros(len(rows), np.bool_)
        before = {shard: local.moment(shard) for shard in np.unique(of).tolist()}
        for shard, moment in before.items():
            is_proven[of == shard] = local.are_proven(shard, numbers[of == shard], moment)
        opened = self._open_files(rows)
        try:
            self._read_all(opened, views, read)
        except DamageError:
            return False
        for shard, moment in before.items():
            if Moment.of(opened.files[shard]) != moment:
                is_proven[of == shard] = False
        is_right = is_proven.copy()
        for at in np.flatnonzero(~is_proven).tolist():
            is_right[at] = functools.reduce(lambda crc, view: zlib.crc32(view, crc), views[at], 0) == rows["crc32"][at]
        for shard, moment in before.items():
            own = (of == shard) & ~is_proven
            if own.any():
                local.note_compared(shard, numbers[own], pieces[own], is_right[own], moment)
            if local.are_proven(shard, self._cache.rows_of(self._shards[shard]), moment).all():
                self._since[shard] = moment
                self._is_proven[shard] = True
        return bool(is_right.all())


def _fill(views: Sequence[memoryview], data: memoryview) -> None:
    at = 0
    for view in views:
        view[:] = data[at : at + len(view)]
        at += len(view)
