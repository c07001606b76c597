"""Records kept in memory, and the one budget of memory that a process has for them."""

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

_SHARE: Final = 2  # half of the free memory at most: the page cache, batches and models need some, too
_RESERVE: Final = 8  # an eighth of the memory that was free at first stays free for other processes

Numbers = npt.NDArray[np.int64]

_STEP: Final = 64 << 20  # bytes by which it grows: it looks at the free memory before each step
_BEING_WRITTEN: Final = -1

_log: Final = logging.getLogger("tpucache")


@dataclass
class _Claim:
    """The bytes that an owner may use, and those that it uses already, which are no longer free."""

    promised: int = 0
    used: int = 0


class MemoryBudget:
    """Gives memory to objects that keep records, as long as they exist. Threads may share one."""

    def __init__(self) -> None:
        """Begin with nothing given."""
        self._claims: weakref.WeakKeyDictionary[object, _Claim] = weakref.WeakKeyDictionary()
        self._first = 0  # bytes that were free when somebody first asked
        self._lock = ThreadLock()

    @property
    def room(self) -> int:
        """Bytes that may still be taken without the user's asking for it."""
        with self._lock:
            return self._room()

    @property
    def free(self) -> int:
        """Bytes that are free and not promised to anybody."""
        with self._lock:
            return self._free()

    def take(self, owner: object, size: int, *, is_used: bool = True) -> bool:
        """Give an owner `size` bytes more, if there is room; return whether there is.

        `is_used` says that the owner uses them from now on: the system no longer counts them as free.
        """
        with self._lock:
            if size > self._room():
                return False
            claim = self._claims.setdefault(owner, _Claim())
            claim.promised += size
            claim.used += size if is_used else 0
            return True

    def promise(self, owner: object, size: int) -> bool:
        """Promise an owner `size` bytes, which it takes by `use`, if they are free; return whether they are."""
        with self._lock:
            if size > self._free():
                return False
            self._claims.setdefault(owner, _Claim()).promised += size
            return True

    def use(self, owner: object, size: int) -> None:
        """Note that an owner uses `size` of its promised bytes from now on."""
        with self._lock:
            self._claims[owner].used += size

    def forget_promises(self) -> None:
        """Take back bytes that are not used: a forked process was promised nothing."""
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
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BUDGET.forget_promises)


class RecordMemory:
    """Records by their numbers in the index, each kept once, in the order in which they are first read.

    It grows while the process's budget allows it; after that, further records are not kept. Threads may share one. A
    pickled copy begins empty.
    """

    def __init__(self, record_bytes: int, records: int, most: int) -> None:
        """Take no memory yet; there are `records` in the index, of which at most `most` are ever kept."""
        self._size, self._most = max(1, record_bytes), most
        self._places = np.zeros(records, np.int64)  # one more than a record's place; 0: it has none
        self._rows: npt.NDArray[np.uint8] | None = None
        self._base = 0  # the address of the first place
        self._granted = 0  # places that the budget gave memory for
        self._used = 0
        self._is_promised = False
        self._is_full = False
        self._process = os.getpid()
        self._lock = ThreadLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordMemory, (self._size, len(self._places), self._most)  # the copy in another process begins empty

    @property
    def wanted(self) -> int:
        """Bytes that all records take."""
        return self._size * self._most

    @property
    def granted(self) -> int:
        """Bytes that the budget has given so far."""
        return self._granted * self._size

    @property
    def is_full(self) -> bool:
        """Whether there was no room for a record lately."""
        return self._is_full

    def promise(self) -> bool:
        """Ask the budget for memory for all records; return whether it is free."""
        self._is_promised = self._reserve(self._most) and BUDGET.promise(self, self.wanted)
        self._granted = self._most if self._is_promised else 0
        return self._is_promised

    def addresses(self, numbers: Numbers) -> Addresses:
        """Return where records are kept: int64 (n,), 0 for those that are not."""
        places = self._places[numbers]
        found: Addresses = np.where(places > 0, self._base + (places - 1) * self._size, 0)
        return found

    def keep(self, numbers: Numbers, write: Callable[[npt.NDArray[np.intp], Addresses], None]) -> None:
        """Keep records, as far as there is room and no other thread is doing so.

        `write` is given which of them, by their place among the numbers, and the addresses to write them to.
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
        """Return for how many of `records` more records there is room, after growing if necessary."""
        if self._process != os.getpid():  # a forked process shares what was written, and was promised nothing itself
            self._process, self._granted, self._is_promised = os.getpid(), self._used, False
        while self._granted < self._used + records and not self._is_full:
            self._grow()
        return min(records, self._granted - self._used)

    def _grow(self) -> None:
        """Take one more step from the budget, or note that it has no more."""
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
            _log.info("%.1f of %.1f GB of records are kept, the others are read each time", kept, self.wanted / 1e9)

    def _reserve(self, records: int) -> bool:
        """Reserve addresses, which take no memory before they are written to; return whether the system allows it."""
        try:
            self._rows = np.empty((records, self._size), np.uint8)
        except (MemoryError, ValueError):  # ValueError: more bytes than there are addresses
            return False
        self._base = address(self._rows)
        return True
