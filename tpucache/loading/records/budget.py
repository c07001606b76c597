"""How much memory this process may take for records: one budget, whatever it reads them for."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Final

from tpucache.machine import available_memory
from tpucache.store.files.lock import ThreadLock

_SHARE: Final = 2  # half of what is free at most: the page cache, batches and models need memory, too
_RESERVE: Final = 8  # of what was free at first, an eighth stays free: other processes may take theirs at the same time


@dataclass
class _Claim:
    """Bytes that somebody may use, and those in use that are therefore no longer free."""

    promised: int = 0
    used: int = 0


class MemoryBudget:
    """Gives memory to those who keep or map records, as long as they exist. Threads may share one."""

    def __init__(self) -> None:
        """Begin with nothing given."""
        self._claims: weakref.WeakKeyDictionary[object, _Claim] = weakref.WeakKeyDictionary()
        self._first = 0  # bytes that were free when somebody first asked
        self._lock = ThreadLock()

    @property
    def room(self) -> int:
        """Bytes that may still be taken without being asked for by the user."""
        with self._lock:
            return self._room()

    @property
    def free(self) -> int:
        """Bytes that are free and not promised to anybody."""
        with self._lock:
            return self._free()

    def take(self, owner: object, size: int, *, is_used: bool = True) -> bool:
        """Give an owner so many bytes more, where there is room; return whether there is.

        `is_used` says that they are in use from now on, and will not be counted as free.
        """
        with self._lock:
            if size > self._room():
                return False
            claim = self._claims.setdefault(owner, _Claim())
            claim.promised += size
            claim.used += size if is_used else 0
            return True

    def promise(self, owner: object, size: int) -> bool:
        """Promise an owner as many bytes as are free at most, which `use` will take; return whether they are."""
        with self._lock:
            if size > self._free():
                return False
            self._claims.setdefault(owner, _Claim()).promised += size
            return True

    def use(self, owner: object, size: int) -> None:
        """Note that so many of the bytes promised to an owner are in use from now on."""
        with self._lock:
            self._claims[owner].used += size

    def forget_promises(self) -> None:
        """Take back what is not in use: promises are to one process, and this is a copy of it."""
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
