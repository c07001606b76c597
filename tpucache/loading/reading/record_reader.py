"""RecordReader: reads records into batch buffers: from memory, from maps of the shards, or from the files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError, FormatError, StoreError, UsageError
from tpucache.loading.reading.maps import MAPPED, PREPARE_SECONDS, MapUse, ShardMaps
from tpucache.loading.reading.memory import BUDGET, Buffer, BufferPool, BufferPools, RecordMemory
from tpucache.loading.reading.views import decode_view
from tpucache.native import Addresses, Array, FileRecords, address, copy_rows, native
from tpucache.store.ahead import Threads
from tpucache.store.cache import Cache
from tpucache.store.codecs import CODECS, decode_rows, unpack_files, unpack_rows
from tpucache.store.fields import Field, RecordLayout
from tpucache.store.index import Numbers, Rows
from tpucache.store.manifest import ShardEntry
from tpucache.text import size_text

if TYPE_CHECKING:
    from tpucache.store.reader import Arriving, NetworkUse

_LEAST_PREPARED: Final = 128 << 20  # bytes; the first epoch reads fewer in a moment anyway
_MOST_PREPARED: Final = 4 << 30  # bytes; more cannot be copied in PREPARE_SECONDS
_BATCH_BYTES: Final = 16 << 20
_PROBES: Final = 4

InMemory = bool | Literal["auto"]
Indices = npt.NDArray[np.int64]
Block = npt.NDArray[np.uint8]
#: divide(work, n) calls `work(start, stop)` for parts of the rows 0 to n, in any threads, until all rows are done.
Divide = Callable[[Callable[[int, int], None], int], None]

#: use(rows, addresses) processes the records of these rows of a batch, both int64 (n,). The addresses are valid only
#: during the call.
UseRecords = Callable[[Numbers, Addresses], None]


class ReadingPlan(NamedTuple):
    """How records are read: "keep" in memory after the first read, "map" the shards, or "stream" from files each time.

    `planned_bytes` is the memory that the process will use for records: 0 for maps, which are the system's page cache.
    """

    way: Literal["keep", "map", "stream"]
    planned_bytes: int

    @property
    def text(self) -> str:
        size = size_text(self.planned_bytes)
        if self.way == "keep":
            return f"kept in memory, {size}"
        if self.way == "map":
            return "mapped"
        return f"from files, {size} of them kept in memory" if self.planned_bytes else "from files"


def undivided(work: Callable[[int, int], None], rows: int) -> None:
    """Do the work for all rows in one call, in this thread. This is the simplest `Divide` function."""
    work(0, rows)


class WaysRead(NamedTuple):
    """How many records and bytes were read from memory, from maps and from files."""

    memory: int = 0
    map: int = 0
    file: int = 0
    memory_bytes: int = 0
    map_bytes: int = 0
    file_bytes: int = 0


class RecordReader:
    """Reads records of a cache by their index row numbers. Threads may share one reader.

    A dataset and all datasets selected from it share one reader, with its files, maps, buffers and records in memory.
    """

    def __init__(
        self,
        cache: Cache,
        most: int,
        in_memory: InMemory = False,
        *,
        is_packed: bool = False,
        shown: tuple[Field, ...] | None = None,
    ) -> None:
        """Prepare to read at most `most` different records.

        "auto" keeps records that a loader reads, as far as there is room, if their shards cannot be mapped.
        """
        if not isinstance(in_memory, bool) and in_memory != "auto":
            raise UsageError(f'in_memory is True, False or "auto", not {in_memory!r}')
        if any(CODECS[field.codec].has_any_length for field in cache.manifest.fields):
            raise FormatError(f"{cache.directory} holds a field of bytes, whose length varies: tensors cannot hold it")
        self.cache = cache
        self.in_memory: InMemory = in_memory
        self._layout = cache.manifest.layout
        stored = cache.manifest.fields
        self._shown = stored if shown is None else shown
        #: The fields as they are read, which are the arrays of a buffer.
        self.fields = tuple(field.packed for field in self._shown) if is_packed else self._shown
        #: Whether records are just the bytes of their fields, so that `visit` can be used.
        self.is_plain = all(
            field.is_plain if form == field else field.stored_bytes == form.nbytes
            for field, form in zip(stored, self.fields, strict=True)
        )
        self._is_decoded = not self.is_plain and self.fields == self._shown
        lengths = [field.nbytes for field in self.fields]
        self._record_bytes = sum(lengths)
        self._offsets = [0, *itertools.accumulate(lengths)][: len(lengths)]  # the fields' offsets in a decoded record
        self._most = most
        self._memory = RecordMemory(self._record_bytes, cache.manifest.records, most if in_memory else 0)
        self._maps = ShardMaps(cache.reader, cache.manifest.records)
        self._scratch = RecordScratch()
        self.pools = BufferPools(self.fields)
        self._packed: RecordReader | None = None
        if in_memory is True and not self._memory.promise():
            raise UsageError(
                f"{most:,} records in memory take {self._memory.wanted / 1e9:,.1f} GB, and "
                f'{max(0, BUDGET.free) / 1e9:,.1f} GB are free: leave in_memory out, or give in_memory="auto"'
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_scratch", "pools", "_packed")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._scratch = RecordScratch()
        self.pools = BufferPools(self.fields)
        self._packed = None

    @property
    def maps(self) -> dict[str, int]:
        return self._maps.how

    @property
    def network(self) -> NetworkUse | None:
        arriving = self.cache.reader.arriving
        return None if arriving is None else arriving.network()

    def packing(self) -> RecordReader:
        """Return a reader that leaves fields packed, with records in memory of its own: this one if no field
        changes.
        """
        if all(field.packed == form for field, form in zip(self._shown, self.fields, strict=True)):
            return self
        if self._packed is None:
            self._packed = RecordReader(self.cache, self._most, self.in_memory, is_packed=True, shown=self._shown)
        return self._packed

    def plan(self, records: int, shards: Sequence[ShardEntry]) -> ReadingPlan:
        needed = records * self._record_bytes
        first = self.cache.manifest.shards.index(shards[0]) if shards else 0
        if self.in_memory is True:
            return ReadingPlan("keep", needed)
        if self.is_plain and needed and self._maps.how_to_map(first) in MAPPED:
            return ReadingPlan("map", 0)
        room = max(0, BUDGET.room) + self._memory.granted if self.in_memory else 0
        return ReadingPlan("keep" if 0 < needed <= room else "stream", min(needed, room))

    @property
    def most_to_prepare(self) -> int:
        """The number of records that `prepare` may keep: none if records are decoded on the host, which takes too
        long.
        """
        return 0 if self._is_decoded or not self.in_memory else _MOST_PREPARED // max(1, self._record_bytes)

    def prepare(self, records: int, shards: Sequence[ShardEntry], first: Numbers, threads: int) -> None:
        """Prepare to read `records` records of `shards`: map the shards, or keep the first records in memory.

        `first` are the index row numbers of the first records.
        """
        with contextlib.suppress(StoreError):
            way, needed = self.plan(records, shards)
            if way == "map":
                manifest = self.cache.manifest
                each = [manifest.variants.index(entry.variant) * manifest.samples + entry.first for entry in shards]
                self._maps.prepare(self.cache.index[np.array(each, np.int64)], threads)
            elif way == "keep" and needed >= _LEAST_PREPARED:
                self._keep_present(first[self._memory.addresses(first) == 0], threads)

    def _keep_present(self, rows: Numbers, threads: int) -> None:
        """Keep records in memory, if they are in the page cache, for at most half a second."""
        end = time.monotonic() + PREPARE_SECONDS
        batch = max(1, _BATCH_BYTES // max(1, self._record_bytes))
        pool = BufferPool(self.fields, batch)

        def keep(part: Numbers) -> None:
            probes = self.cache.index[part[:: max(1, len(part) // _PROBES)]]
            if time.monotonic() < end and self.cache.reader.are_in_memory(probes):
                buffer = pool.take()
                self.read_into(buffer, part, keep=True)
                pool.give_back(buffer)

        with Threads(threads, "tpucache-prepare") as executor:  # starts a thread only when there is work
            deque(executor.map(keep, (rows[at : at + batch] for at in range(0, len(rows), batch))), 0)

    def read_into(self, buffer: Buffer, rows: Numbers, *, keep: bool = False, divide: Divide = undivided) -> WaysRead:
        """Read records, by their index row numbers, into the first rows of a buffer.

        With `keep`, the records are also kept in memory, as far as there is room; `in_memory=True` always keeps them.
        """
        if (arriving := self.cache.reader.arriving) is not None:
            keep = self._may_keep(arriving, keep)
        with MapUse(self._maps.uses):
            places = self._find(rows)
            divide(functools.partial(self._read_part, buffer, rows, places, keep or self.in_memory is True), len(rows))
        return self._ways(places)

    def visit(self, rows: Numbers, use: UseRecords, parts: Numbers, *, divide: Divide = undivided) -> WaysRead:
        """Call `use` with the addresses of plain records. Records that are only in files are read into memory first.

        `parts`, int64 (n, any, 2), has the byte ranges of each record that are used, as offsets and lengths. Of a
        record that is read from a file and not kept, only these are read.
        """
        arriving = self.cache.reader.arriving
        keep = arriving is None or self._may_keep(arriving, keep=True)
        with MapUse(self._maps.uses):
            places = self._find(rows)
            divide(functools.partial(self._visit_part, rows, places, use, parts, keep), len(rows))
        return self._ways(places)

    def _may_keep(self, arriving: Arriving, keep: bool) -> bool:
        """Return whether to keep records in memory: unless in_memory is True, not while others are being fetched.

        To save CPU time, such records are only kept in a later epoch.
        """
        return keep and (self.in_memory is True or not arriving.is_busy)

    def _visit_part(
        self, rows: Numbers, places: _Places, use: UseRecords, parts: Numbers, keep: bool, start: int, stop: int
    ) -> None:
        decoded = places.decoded[start:stop]
        present = np.flatnonzero(decoded)
        if len(present):
            use(start + present, decoded[present])
        if places.found is None:
            return
        missing = start + np.flatnonzero(decoded == 0)
        count = max(1, _BATCH_BYTES // max(1, self._record_bytes))
        for first in range(0, len(missing), count):
            some = missing[first : first + count]
            block, starts = self._scratch.block(np.full(len(some), self._record_bytes))
            keep = keep and bool(self.in_memory) and not self._memory.is_full
            self._read_to(block, starts, places.found[some], None if keep else parts[some])
            addresses = address(block) + starts
            use(some, addresses)
            if keep:
                self._memory.keep(rows[some], functools.partial(_copy_some, addresses, self._record_bytes))

    def _read_to(self, block: Array, starts: Numbers, found: Rows, parts: Numbers | None) -> None:
        """Read plain records, or only the byte ranges `parts` of them, to the offsets `starts` in a block."""
        done = 0 if parts is None else self._read_parts(address(block) + starts, found, parts)
        starts = starts[done:]
        views = [[block.data[at : at + self._record_bytes]] for at in starts.tolist()]
        whole = np.stack([address(block) + starts, np.full(len(starts), self._record_bytes)], -1)[:, None]
        if len(starts):
            self._scatter(found[done:], views, whole, is_large=True)

    def _read_parts(self, targets: Addresses, found: Rows, parts: Numbers) -> int:
        """Read only the byte ranges `parts` of plain records.

        Returns how many records were read, from the first on; 0 if the compiled loop cannot read them.
        """
        loops = native()
        if loops is None or (found["length"] != self._record_bytes).any():
            return 0
        each = int(parts.shape[1])
        lengths = np.ascontiguousarray(parts[:, :, 1]).reshape(-1)
        to = np.stack([(targets[:, None] + parts[:, :, 0]).reshape(-1), lengths], -1)

        def read(descriptors: Numbers, rows: Rows) -> int:
            files = np.repeat(descriptors, each)
            offsets = (rows["offset"].astype(np.int64)[:, None] + parts[:, :, 0]).reshape(-1)
            numbers = address(files), address(offsets), address(to), 1, address(lengths)
            return loops.read(*numbers, len(files)) // each

        return self.cache.reader.read_by(found, read)

    def _ways(self, places: _Places) -> WaysRead:
        count = len(places.decoded)
        if places.found is None:
            return WaysRead(memory=count, memory_bytes=count * self._record_bytes)
        mapped = int(np.count_nonzero(places.encoded))
        if places.is_complete and self.is_plain:  # mapped records need not be decoded, and all have one length
            ways = WaysRead(count - mapped, mapped)
            return ways._replace(memory_bytes=ways.memory * self._record_bytes, map_bytes=mapped * self._record_bytes)
        is_mapped = places.encoded != 0
        is_in_file = (places.decoded == 0) & ~is_mapped
        files, lengths = int(np.count_nonzero(is_in_file)), places.found["length"]
        memory = count - mapped - files
        of_maps, of_files = int(lengths[is_mapped].sum()), int(lengths[is_in_file].sum())
        return WaysRead(memory, mapped, files, memory * self._record_bytes, of_maps, of_files)

    def hint(self, rows: Numbers) -> None:
        if self.cache.reader.arriving is not None:
            return  # `Arriving.expect` was called instead
        missing = self.not_in_memory(rows[~self._maps.is_present(rows)])
        self.cache.reader.hint(self.cache.index[missing])
        if self.cache.reader.is_late:  # elsewhere, the reader may have done nothing
            self._maps.note_asked(missing)

    def not_in_memory(self, rows: Numbers) -> Numbers:
        return rows[self._memory.addresses(rows) == 0] if self.in_memory else rows

    def _find(self, rows: Numbers) -> _Places:
        decoded = self._memory.addresses(rows) if self.in_memory else np.zeros(len(rows), np.int64)
        if decoded.all():
            return _Places(decoded, decoded, None, is_complete=True)
        missing = np.flatnonzero(decoded == 0)
        encoded = np.zeros(len(rows), np.int64)
        found = self.cache.index[rows]
        if self.in_memory is not True:
            encoded[missing] = self._maps.addresses(rows[missing], found[missing])
        if self.is_plain:
            is_whole = found["length"] == self._record_bytes  # reading a record of another length raises an error
            decoded[missing] = np.where(is_whole, encoded, 0)[missing]
        return _Places(decoded, encoded, found, is_complete=bool(decoded.all()))

    def _read_part(self, buffer: Buffer, rows: Numbers, places: _Places, keep: bool, start: int, stop: int) -> None:
        decoded = places.decoded[start:stop]
        if places.is_complete:
            self._copy(buffer, slice(start, stop), decoded)
            return
        present = np.flatnonzero(decoded)
        if len(present):
            self._copy(buffer, start + present, decoded[present])
        missing = start + np.flatnonzero(decoded == 0)
        if len(missing) and places.found is not None:
            try:
                self._read(buffer, missing, places.found[missing], places.encoded[missing])
            except DamageError as error:
                raise self._named(error, rows[missing], places.found[missing]) from error
            if keep and self.in_memory:
                self._memory.keep(rows[missing], functools.partial(self._copy_out, buffer, missing))

    def _named(self, error: DamageError, numbers: Numbers, found: Rows) -> DamageError:
        """Read records one by one, and return the error of the first that does not decode, which names its sample."""
        single = Buffer(self.fields, 1)
        nothing = np.zeros(1, np.int64)
        for number, row in zip(numbers.tolist(), found, strict=True):
            try:
                self._read(single, nothing, row.reshape(1), nothing)
            except DamageError as one:
                return self._damage(number, row, one)
        return error

    def _damage(self, number: int, row: Rows, reason: object) -> DamageError:
        cache = self.cache
        place, position = divmod(number, cache.manifest.samples)
        shard = cache.reader.path(int(row["shard"])).name
        path, variant = cache.samples.paths[position], cache.manifest.variants[place]
        return DamageError(
            f"Shard {shard} in {cache.directory}, the record of {path!r} in variant {variant}: {reason}. "
            f"Run `tpucache verify {cache.directory}`, or copy the cache again."
        )

    def _copy(self, buffer: Buffer, rows: Indices | slice, sources: Addresses) -> None:
        for starts, length, offset in zip(buffer.starts, buffer.lengths, self._offsets, strict=True):
            copy_rows(starts[rows], sources + offset, length, past_caches=buffer.is_large)

    def _copy_out(self, buffer: Buffer, rows: Indices, chosen: Indices, targets: Addresses) -> None:
        for starts, length, offset in zip(buffer.starts, buffer.lengths, self._offsets, strict=True):
            copy_rows(targets + offset, starts[rows[chosen]], length, past_caches=buffer.is_large)

    def _read(self, buffer: Buffer, places: Indices, found: Rows, mapped: Addresses) -> None:
        """Read records from files, or decode them from maps, into the rows `places` of a buffer."""
        if self.is_plain:
            self._scatter(found, buffer.views(places), buffer.parts(places), buffer.is_large)
            return
        rows = buffer.places(places)
        targets = [
            _Target(field, form != field, array, rows)
            for field, form, array in zip(self._shown, self.fields, buffer.arrays, strict=True)
        ]
        self._read_encoded(targets, found, mapped, buffer.is_large)

    def _read_encoded(self, targets: list[_Target], found: Rows, mapped: Addresses, is_large: bool) -> None:
        unmapped = mapped == 0
        chosen = np.flatnonzero(~unmapped)
        if len(chosen):
            block, start = self._maps.block()
            lengths = found["length"][chosen].astype(np.int64)
            _decode(self._layout, [each.of(chosen) for each in targets], block, mapped[chosen] - start, lengths)
        left = np.flatnonzero(unmapped)
        if len(left):
            left = left[self._unpack([each.of(left) for each in targets], found[left]) :]
        if not len(left):
            return
        found, targets = found[left], [each.of(left) for each in targets]
        lengths = found["length"].astype(np.int64)
        block, starts = self._scratch.block(lengths)
        data, ends = block.data, starts + lengths
        views = [[data[start:end]] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        parts = np.stack([address(block) + starts, lengths], -1)[:, None]
        self._scatter(found, views, parts, is_large)
        _decode(self._layout, targets, block, starts, lengths)

    def _unpack(self, targets: list[_Target], found: Rows) -> int:
        """Read and unpack records one by one, if they have a single field that stays packed.

        Returns how many of the records, from the first on, were read.
        """
        target, *others = targets
        if others or not target.is_packed:
            return 0

        def read(descriptors: Numbers, rows: Rows) -> int:
            offsets, lengths = rows["offset"].astype(np.int64), rows["length"].astype(np.int64)
            return unpack_files(target.field, FileRecords(descriptors, offsets, lengths), target.array, target.rows)

        return self.cache.reader.read_by(found, read)

    def _scatter(self, rows: Rows, views: list[list[memoryview]], parts: Numbers, is_large: bool) -> None:
        """Read whole records from their files into memory.

        The memory is given twice: as `views`, and as addresses and lengths in `parts`, int64 (n, fields, 2).
        """
        loops = native() if is_large else None
        if loops is None:
            self.cache.reader.scatter(rows, views)
            return

        def read(descriptors: Numbers, rows: Rows) -> int:
            offsets, lengths = rows["offset"].astype(np.int64), rows["length"].astype(np.int64)
            numbers = address(descriptors), address(offsets), address(parts), parts.shape[1], address(lengths)
            return loops.read(*numbers, len(rows))

        self.cache.reader.scatter(rows, views, read=read)


class _Target(NamedTuple):
    """An array, and the numbers of its rows, into which one field of some records is written."""

    field: Field
    is_packed: bool
    array: Array
    rows: Numbers

    def of(self, chosen: Indices) -> _Target:
        return self._replace(rows=self.rows[chosen])


def _decode(layout: RecordLayout, targets: list[_Target], block: Block, starts: Numbers, lengths: Numbers) -> None:
    spans = layout.spans_of(block, starts, lengths)
    for at, (stored, target) in enumerate(zip(layout.fields, targets, strict=True)):
        to = block, spans[:, at], target.array, target.rows
        if target.is_packed:
            unpack_rows(target.field, *to)
        elif target.field.view is None:
            decode_rows(target.field, *to)
        else:
            decode_view(target.field, stored, *to)


def _copy_some(sources: Addresses, length: int, chosen: Indices, targets: Addresses) -> None:
    copy_rows(targets, sources[chosen], length, past_caches=True)


class _Places(NamedTuple):
    """Where each record of a batch lies in memory, and its row of the index.

    `decoded` has the address of its decoded bytes and `encoded` that of its encoded bytes, 0 if they are not in memory.
    `found` has the index rows, or None if all records are kept in memory. `is_complete` says whether `decoded` has an
    address for every record.
    """

    decoded: Addresses
    encoded: Addresses
    found: Rows | None
    is_complete: bool


class RecordScratch(threading.local):
    """Memory for the encoded records of a batch. It is reused for the next batch, because new memory is slow."""

    def __init__(self) -> None:
        self._block: Array = np.empty(0, np.uint8)

    def block(self, lengths: Numbers) -> tuple[Array, Numbers]:
        """Return a block of bytes (uint8) for records of these lengths, and the offset of each record in it.

        The next call in the same thread reuses the block.
        """
        ends = np.cumsum(lengths)
        size = int(ends[-1]) if len(ends) else 0
        if size > len(self._block):
            try:
                self._block = np.empty(size + size // 4, np.uint8)
            except MemoryError as error:
                raise DamageError(
                    f"{len(ends)} encoded records take {size / 1e9:,.1f} GB by the index, more memory than there is: "
                    "the index is damaged (run `tpucache verify`), or a batch is too large"
                ) from error
        return self._block, ends - lengths
