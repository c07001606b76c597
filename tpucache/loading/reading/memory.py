"""RecordMemory keeps records in memory. All of a process's RecordMemory objects share one MemoryBudget."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.machine import available_memory
from tpucache.native import Addresses, address
from tpucache.store.files import ThreadLock

_SHARE: Final = 2  # at most half of the free memory: the page cache, batches and models need some, too
_RESERVE: Final = 8  # an eighth of the memory that was free at the first request is left for other processes

Numbers = npt.NDArray[np.int64]

_STEP: Final = 64 << 20  # memory grows by this many bytes; the free memory is checked before each step
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

    def __init__(self) -> None:
        """Start with nothing granted."""
        self._claims: weakref.WeakKeyDictionary[object, _Claim] = weakref.WeakKeyDictionary()
        self._first = 0  # the free bytes at the first request
        self._lock = ThreadLock()

    @property
    def room(self) -> int:
        """The bytes that may still be taken by default, without `in_memory=True`."""
        with self._lock:
            return self._room()

    @property
    def free(self) -> int:
        """The bytes that are free and not promised to any owner."""
        with self._lock:
            return self._free()

    def take(self, owner: object, size: int, *, is_used: bool = True) -> bool:
        """Grant an owner `size` more bytes, if `room` is that large. Returns whether they were granted.

        `is_used` means that the owner uses the bytes at once, so that the system no longer shows them as free.
        """
        with self._lock:
            if size > self._room():
                return False
            claim = self._claims.setdefault(owner, _Claim())
            claim.promised += size
            claim.used += size if is_used else 0
            return True

    def promise(self, owner: object, size: int) -> bool:
        """Promise an owner `size` bytes, which it takes later by `use`. Returns False if fewer are `free`."""
        with self._lock:
            if size > self._free():
                return False
            self._claims.setdefault(owner, _Claim()).promised += size
            return True

    def use(self, owner: object, size: int) -> None:
        """Record that an owner has begun to use `size` more of its promised bytes."""
        with self._lock:
            self._claims[owner].used += size

    def forget_promises(self) -> None:
        """Cancel promised bytes that are not used. Called in a forked process, to which nothing was promised."""
        for claim in list(self._claims.values()):
            claim.promised = claim.used

    def _room(self) -> int:
        available = available_memory()
        self._first = self._first or available
        claims = list(self._claims.values())
        promised, used = sum(claim.promised for claim in claims), sum(claim.used for claim in claims)
        return min((available + used) // _SHARE - promised, available - self._first // _RESERVE)

    def _free(self) -> int:
        return available_memory() - sum(claim.promised - claim.used for claim in list(self._claims.values()))


BUDGET: Final = MemoryBudget()
os.register_at_fork(after_in_child=BUDGET.forget_promises)


class RecordMemory:
    """Keeps records in memory by their index row numbers, each once, in the order of their first read.

    It grows as long as the process's budget allows. After that, further records are not kept. Threads may share one
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
        self._is_full = False
        self._process = os.getpid()
        self._lock = ThreadLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordMemory, (self._size, len(self._places), self._most)  # a copy in another process starts empty

    @property
    def wanted(self) -> int:
        """The bytes of all records that may be kept."""
        return self._size * self._most

    @property
    def granted(self) -> int:
        """The bytes that the budget has granted so far."""
        return self._granted * self._size

    @property
    def is_full(self) -> bool:
        """Whether the budget refused memory for more records."""
        return self._is_full

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
        while self._granted < self._used + records and not self._is_full:
            self._grow()
        return min(records, self._granted - self._used)

    def _grow(self) -> None:
        most = min(self._most, self._granted + max(0, BUDGET.room) // self._size)
        if self._rows is None and self._reserve(most):
            _log.info("records are kept in memory as they are read, %.1f GB at most", most * self._size / 1e9)
        capacity = 0 if self._rows is None else len(self._rows)
        step = min(max(1, _STEP // self._size), capacity - self._granted)
        self._is_full = step <= 0 or not BUDGET.take(self, step * self._size)
        if not self._is_full:
            self._granted += step
        elif self._granted < self._most:
            kept = self.granted / 1e9
            _log.info("%.1f of %.1f GB of records are kept, the rest is read each time", kept, self.wanted / 1e9)

    def _reserve(self, records: int) -> bool:
        """Reserve addresses, which take no memory until they are written."""
        try:
            self._rows = np.empty((records, self._size), np.uint8)
        except (MemoryError, ValueError):  # ValueError: more bytes than the address space has
            return False
        self._base = address(self._rows)
        return True
