"""Memory of batches and of records: buffers that are used again, and records that are kept, within one budget.

The page faults of a new batch of 38 MB cost as much as the copy into it, so a buffer is used again after the last
tensor over it is freed. A caller may keep a batch as long as it likes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.machine import available_memory
from tpucache.native import Addresses, Array, address, is_large, native
from tpucache.store.ahead import Threads
from tpucache.store.fields import Field
from tpucache.store.files import ThreadLock

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]

# A buffer is freed if neither the last 64 batches nor the last 30 seconds needed it. A new one costs as much as several
# batches, so it should survive the pause between two loops.
_BATCHES: Final = 64
_SECONDS: Final = 30.0
_POOLS: Final = 2  # one for training, one for validation


class Buffer:
    """The memory of one batch: an array (batch, *shape) for each field, and the addresses of its rows."""

    def __init__(self, fields: Sequence[Field], batch: int, allocate: Allocate = np.empty) -> None:
        try:
            self.arrays = [allocate((batch, *field.shape), np.dtype(field.dtype)) for field in fields]
        except UsageError:  # raised by the allocator
            raise
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than the address space has
            gigabytes = batch * sum(field.nbytes for field in fields) / 1e9
            raise UsageError(
                f"a batch of {batch:,} samples takes {gigabytes:,.1f} GB, more than there is in memory: make batches "
                "smaller"
            ) from error
        #: For each field: the size of a row in bytes, and the addresses of all rows, int64 (batch,).
        self.lengths = [field.nbytes for field in fields]
        self.starts = [
            address(array) + length * np.arange(batch) for array, length in zip(self.arrays, self.lengths, strict=True)
        ]
        #: Whether stores that bypass the CPU's caches fill the buffer faster.
        self.is_large = is_large(batch, batch * sum(self.lengths))

    @functools.cached_property
    def _views(self) -> list[list[memoryview]]:
        flat = [
            array.view(np.uint8).reshape(len(array), length)
            for array, length in zip(self.arrays, self.lengths, strict=True)
        ]
        return [[memoryview(part[row]) for part in flat] for row in range(len(self.starts[0]))]

    def views(self, rows: npt.NDArray[np.integer[Any]]) -> list[list[memoryview]]:
        """Return writable views of the bytes of each row, one per field."""
        return [self._views[row] for row in rows.tolist()]

    def parts(self, rows: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the address and the length of each field of each row, as `preadv` takes them: int64 (n, fields, 2)."""
        parts = np.empty((len(rows), len(self.lengths), 2), np.int64)
        for at, (starts, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            parts[:, at, 0] = starts[rows]
            parts[:, at, 1] = length
        return parts

    def places(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows' positions in the arrays: the rows themselves, except in a view of another buffer."""
        return rows


class BufferPool:
    """Lends buffers of one shape. Frees buffers that neither the last 64 batches nor the last 30 s needed.

    With `allocate`, buffers are not used again: torch's allocator of page-locked memory does that, and knows when the
    copies from it have ended.
    """

    def __init__(self, fields: Sequence[Field], batch: int, allocate: Allocate | None = None) -> None:
        self._make = functools.partial(Buffer, tuple(fields), batch, allocate or np.empty)
        self._allocate = allocate
        # A deque, because its append is atomic: finalizers run in any thread, inside any call, so they cannot lock.
        self._free: deque[Buffer] = deque()
        # Without a lock, an update of these may be lost. Then a buffer is freed a little early or late.
        self._taken = 0
        self._since = time.monotonic()
        self._unused = 0  # the number of buffers that were never used since `_since`

    def take(self) -> Buffer:
        """Return a free buffer, or a new one. The caller owns it until it calls `lend` or `give_back`."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = self._make()
        self._unused = min(self._unused, len(self._free))
        self._taken += 1
        if self._taken >= _BATCHES and time.monotonic() - self._since >= _SECONDS:
            self._free_unused()
        return buffer

    def prepare(self, buffers: int, rows: int) -> None:
        """Allocate free buffers until there are `buffers`, and touch the memory of their first `rows` rows."""
        made: list[Buffer] = []
        while len(self._free) + len(made) < buffers and not self._taken:
            try:
                made.append(self._make())
            except UsageError:
                if self._allocate is not None:
                    raise
                break  # `take` raises it later
            for array in made[-1].arrays:
                array[:rows].reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] = 0
        if made and made[0].is_large:
            native()
        if self._allocate is None:
            self._free.extend(made)

    def give_back(self, buffer: Buffer) -> None:
        if self._allocate is None:
            self._free.append(buffer)

    def lend(self, buffer: Buffer, rows: int) -> list[Array]:
        """Return the first rows of a buffer's arrays. When the last view of them is freed, the buffer is free again."""
        if self._allocate is not None:
            return [array[:rows] for array in buffer.arrays]
        loan = _Loan(buffer, self._free)
        return [loan.view(array[:rows]) for array in buffer.arrays]

    def _free_unused(self) -> None:
        for _ in range(self._unused):
            with contextlib.suppress(IndexError):  # other threads may have taken them meanwhile
                self._free.popleft()
        self._taken, self._since, self._unused = 0, time.monotonic(), len(self._free)


class BufferPools:
    """The buffer pools of a dataset, by batch size. A new loader reuses the pool of an earlier loader."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = tuple(fields)
        self._pools: dict[int, BufferPool] = {}

    def pool(self, batch: int, allocate: Allocate | None = None) -> BufferPool:
        """Return the pool of buffers with `batch` rows, or a new one by `allocate`. Those of the last two batch
        sizes are kept.
        """
        if allocate is not None:
            return BufferPool(self._fields, batch, allocate)
        pool = self._pools.pop(batch, None) or BufferPool(self._fields, batch)
        self._pools[batch] = pool
        for size in list(self._pools)[:-_POOLS]:
            self._pools.pop(size, None)  # another thread may have removed it
        return pool

    def compile_loops(self, batch: int) -> None:
        if is_large(batch, batch * sum(field.nbytes for field in self._fields)):
            Threads(1, "tpucache-compile").submit(native)

    def drop(self, pool: BufferPool) -> None:
        """Remove a pool. Its buffers are freed when the last loader that uses them is freed."""
        for batch, kept in list(self._pools.items()):
            if kept is pool:
                self._pools.pop(batch, None)


class _Loan:
    """The numpy base object of all arrays over one lent buffer.

    It is freed exactly once, with the last of these arrays, in any thread. Then the buffer returns to the pool.
    """

    __array_interface__: dict[str, Any]

    def __init__(self, buffer: Buffer, free: deque[Buffer]) -> None:
        self._buffer = buffer
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._buffer)

    def view(self, array: Array) -> Array:
        self.__array_interface__ = array.__array_interface__
        return np.asarray(self)


_SHARE: Final = 2  # at most half of the free memory: the page cache, batches and models need some, too
_RESERVE: Final = 8  # an eighth of the memory that was free at the first request is left for other processes

Numbers = npt.NDArray[np.int64]

_BEING_WRITTEN: Final = -1

_log: Final = logging.getLogger("tpucache")


@dataclass
class _Claim:
    """The bytes that were `promised` to an owner, and how many of these the owner has `used` already.

    The system no longer shows used bytes as free.
    """

    promised: int = 0
    used: int = 0


class MemoryBudget:
    """Grants memory to objects that keep records, for as long as the objects exist. Threads may share one budget."""

    def __init__(self, available: Callable[[], int] = available_memory, step: int = 64 << 20) -> None:
        # Owners take `step` bytes at a time; the free memory is checked before each step.
        self.available, self.step = available, step
        self._claims: weakref.WeakKeyDictionary[object, _Claim] = weakref.WeakKeyDictionary()
        self._first = 0  # the free bytes at the first request
        self._lock = ThreadLock()

    @property
    def room(self) -> int:
        """The bytes that may still be taken by default, without `in_memory=True`."""
        available = self.available()
        self._first = self._first or available
        promised = sum(claim.promised for claim in list(self._claims.values()))
        return min((available + self.used) // _SHARE - promised, available - self._first // _RESERVE)

    @property
    def free(self) -> int:
        """The bytes that are free and not promised to any owner."""
        return self.available() - sum(claim.promised - claim.used for claim in list(self._claims.values()))

    @property
    def used(self) -> int:
        return sum(claim.used for claim in list(self._claims.values()))

    def take(self, owner: object, size: int, *, is_used: bool = True) -> bool:
        """Grant an owner `size` more bytes, if `room` is that large. Returns whether they were granted.

        `is_used` means that the owner uses them at once.
        """
        with self._lock:
            if size > self.room:
                return False
            claim = self._claims.setdefault(owner, _Claim())
            claim.promised += size
            if is_used:
                claim.used += size
            return True

    def promise(self, owner: object, size: int) -> bool:
        """Promise an owner `size` bytes, which it takes later by `use`. Returns False if fewer are `free`."""
        with self._lock:
            if size > self.free:
                return False
            self._claims.setdefault(owner, _Claim()).promised += size
            return True

    def use(self, owner: object, size: int) -> None:
        with self._lock:
            self._claims[owner].used += size

    def forget_promises(self) -> None:
        """Cancel promised bytes that are not used. Called in a forked process, to which nothing was promised."""
        for claim in self._claims.values():
            claim.promised = claim.used


BUDGET: Final = MemoryBudget()
os.register_at_fork(after_in_child=BUDGET.forget_promises)


class RecordMemory:
    """Keeps records in memory by their index row numbers, each once, in the order of their first read.

    It grows as long as the process's budget allows; after that, further records are not kept. Threads may share one
    object. A pickled copy starts empty.
    """

    def __init__(self, record_bytes: int, records: int, most: int) -> None:
        """Allocate nothing yet. `records` is the number of records in the index; at most `most` of them are kept."""
        self._size, self._most = max(1, record_bytes), most
        self._places = np.zeros(records, np.int64)  # a record's place plus 1; 0 if it is not kept
        self._rows: npt.NDArray[np.uint8] | None = None
        self._base = 0  # the address of the first place
        self._granted = 0  # places that the budget gave memory for
        self._used = 0
        self._is_promised = False
        self.is_full = False
        self._process = os.getpid()
        self._lock = ThreadLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordMemory, (self._size, len(self._places), self._most)  # a copy in another process starts empty

    @property
    def wanted(self) -> int:
        return self._size * self._most

    @property
    def granted(self) -> int:
        return self._granted * self._size

    def promise(self) -> bool:
        """Reserve memory for all records that may be kept. Returns whether this much memory is free."""
        self._is_promised = self._reserve(self._most) and BUDGET.promise(self, self.wanted)
        self._granted = self._most if self._is_promised else 0
        return self._is_promised

    def addresses(self, numbers: Numbers) -> Addresses:
        """Return the addresses of records: int64 (n,), 0 for records that are not kept."""
        places = self._places[numbers]
        found: Addresses = np.where(places > 0, self._base + (places - 1) * self._size, 0)
        return found

    def keep(self, numbers: Numbers, write: Callable[[npt.NDArray[np.intp], Addresses], None]) -> None:
        """Keep records that are not kept yet, as far as there is room.

        `write(places, addresses)` must copy the records at these positions in `numbers` to the addresses.
        """
        with self._lock:
            unique, first = np.unique(numbers, return_index=True)
            first = first[self._places[unique] == 0]
            first = first[: self._make_room(len(first))]
            chosen = numbers[first]
            places = np.arange(self._used, self._used + len(first))
            self._used += len(first)
            self._places[chosen] = _BEING_WRITTEN
        if len(chosen):
            if self._is_promised:
                BUDGET.use(self, len(chosen) * self._size)
            write(first, self._base + places * self._size)
            self._places[chosen] = places + 1

    def _make_room(self, records: int) -> int:
        """Grow if necessary, and return how many of `records` more records fit."""
        if self._process != os.getpid():  # a forked process shares the written records, but was promised nothing
            self._process, self._granted, self._is_promised = os.getpid(), self._used, False
        while self._granted < self._used + records and not self.is_full:
            most = min(self._most, self._granted + max(0, BUDGET.room) // self._size)
            if self._rows is None and self._reserve(most):
                _log.info("records are kept in memory as they are read, %.1f GB at most", most * self._size / 1e9)
            capacity = 0 if self._rows is None else len(self._rows)
            step = min(max(1, BUDGET.step // self._size), capacity - self._granted)
            self.is_full = step <= 0 or not BUDGET.take(self, step * self._size)
            if not self.is_full:
                self._granted += step
            elif self._granted < self._most:
                text = "%.1f of %.1f GB of records are kept, the rest is read each time"
                _log.info(text, self.granted / 1e9, self.wanted / 1e9)
        return min(records, self._granted - self._used)

    def _reserve(self, records: int) -> bool:
        """Reserve addresses, which take no memory until they are written."""
        try:
            self._rows = np.empty((records, self._size), np.uint8)
        except (MemoryError, ValueError):  # ValueError: more bytes than the address space has
            return False
        self._base = address(self._rows)
        return True
