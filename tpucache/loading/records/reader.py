"""RecordReader: records into the buffers of batches, from their files or from memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tpucache.errors import FormatError, UsageError
from tpucache.loading.records.buffers import Buffer
from tpucache.loading.records.memory import RecordMemory
from tpucache.loading.records.scratch import Scratch
from tpucache.machine import available_memory
from tpucache.store.cache import Cache
from tpucache.store.codecs import decode_rows, unpack_rows
from tpucache.store.index import Numbers

InMemory = bool | Literal["auto"]

_SHARE: Final = 3  # "auto" takes a third of the free memory at most: there may be a second dataset, to validate on


class RecordReader:
    """Reads records of a cache, given by their rows of the index. Threads may share one.

    Readers of the datasets that were selected from one another share the cache's files, and one RecordMemory, of which
    each uses what `keep` has claimed. A pickled copy opens files and fills memory in the process that uses it.
    """

    def __init__(self, cache: Cache, most: int, is_packed: bool = False) -> None:
        """Read from the cache's files until `keep` is called, for at most `most` records.

        `is_packed` leaves the fields that a device can finish as their codecs pack them. Raises FormatError for a field
        whose length varies.
        """
        if any(not field.shape and field.codec == "bytes" for field in cache.manifest.fields):
            raise FormatError(f"{cache.directory} holds a field of bytes, whose length varies: it has no tensor")
        self.cache = cache
        self._layout = cache.manifest.layout
        stored = self._layout.fields
        #: The fields as they are read: the arrays of a buffer.
        self.fields = tuple(field.packed for field in stored) if is_packed else stored
        self._is_plain = all(
            field.is_plain if form == field else field.stored_bytes == form.nbytes
            for field, form in zip(stored, self.fields, strict=True)
        )
        self._most = most
        self._shared_memory = RecordMemory(self.fields, cache.manifest.records, most)
        self._memory: RecordMemory | None = None
        self._scratch = Scratch()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_scratch"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._scratch = Scratch()

    @property
    def is_in_memory(self) -> bool:
        """Whether each record is kept in memory once it is read."""
        return self._memory is not None

    def sharing(self) -> RecordReader:
        """Return a reader of the same files and memory that keeps nothing yet."""
        reader = copy.copy(self)
        reader._memory = None
        return reader

    def packing(self) -> RecordReader:
        """Return a reader of the same files that leaves fields packed, with memory of its own."""
        return RecordReader(self.cache, self._most, is_packed=True)

    def keep(self, rows: Iterable[Numbers], in_memory: InMemory) -> None:
        """Keep these distinct records once they are read; "auto" does where there is plenty of room for all of them.

        Raises UsageError where there is no room for them, unless it is "auto".
        """
        if not isinstance(in_memory, bool) and in_memory != "auto":
            raise UsageError(f'in_memory is True, False or "auto", not {in_memory!r}')
        if not in_memory:
            return
        memory, rows = self._shared_memory, list(rows)
        needed, free = memory.bytes_of(rows), available_memory() - memory.unfilled_bytes
        if in_memory == "auto" and needed * _SHARE > free:
            return
        if needed <= free and memory.claim(rows, free):
            self._memory = memory
        elif in_memory != "auto":
            raise UsageError(
                f"{sum(map(len, rows)):,} records in memory take {needed / 1e9:,.1f} GB, and {max(0, free) / 1e9:,.1f} "
                'GB are free: leave in_memory out, or say "auto"'
            )

    def keep_here(self, rows: Iterable[Numbers]) -> None:
        """Keep in this process what a pickled reader kept in another, or read from files where this one has no room."""
        if self._memory is not None and not self._memory.claim(list(rows), available_memory()):
            self._memory = None

    def read_into(self, buffer: Buffer, rows: Numbers) -> None:
        """Read records into the first rows of a buffer. Raises DamageError naming the shard."""
        memory = self._memory
        if memory is None:
            self._read(rows, buffer, np.arange(len(rows)))
            return
        slots = memory.slots(rows)
        missing = memory.missing(slots)
        if len(missing):
            self._read(rows[missing], memory, slots[missing])
            memory.fill(slots[missing])
        memory.gather(slots, buffer.arrays)

    def hint(self, rows: Numbers) -> None:
        """Ask the kernel to have these records in memory when they are read."""
        if self._memory is not None:
            rows = rows[self._memory.missing(self._memory.slots(rows))]
        self.cache.reader.hint(self.cache.index[rows])

    def _read(self, rows: Numbers, target: Buffer | RecordMemory, places: npt.NDArray[np.int64]) -> None:
        """Read records from their files into their places."""
        found, reader = self.cache.index[rows], self.cache.reader
        if self._is_plain:
            reader.scatter(found, target.views(places))
            return
        lengths = found["length"].astype(np.int64)
        block, starts = self._scratch.block(lengths)
        data = block.data
        ends = starts + lengths
        reader.scatter(found, [[data[start:end]] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)])
        spans = self._layout.spans_of(block, starts, lengths)
        for at, (field, form) in enumerate(zip(self._layout.fields, self.fields, strict=True)):
            if form == field:
                decode_rows(field, block, spans[:, at], target.arrays[at], places)
            else:
                unpack_rows(field, block, spans[:, at], target.arrays[at], places)
