"""Arriving: the protocol for records that are not here yet, because they are on the network or not built yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

#: Returns the numbers of the records that will be read, in their order, some thousand at a time: int64 (n,) each.
Windows = Callable[[], Iterator[npt.NDArray[np.int64]]]


class Arriving(Protocol):
    """Records of a cache that arrive while it is read.

    A reader waits by itself for each record that somebody reads, and raises an error if it cannot come. So nobody has
    to call these methods: they only say in which order records are needed. Threads may share one.
    """

    def expect(
        self, owner: object, variants: Sequence[int], bands: int, windows: Windows, further: Windows | None = None
    ) -> None:
        """Have records arrive in this order, ahead of reading, instead of what the same owner expected before.

        The records belong to these variants and to the first bands; where all of those are here already, nothing is
        done. `further` gives the same windows once more, and those of later epochs after them: where not all records
        can be kept, it decides which are. Other threads may go through the windows, one at a time.
        """
        ...

    def prioritise(self, numbers: npt.NDArray[np.int64]) -> None:
        """Say that these records are read next; may return once they are here."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether records arrive as fast as they are read, so that the processor has no time to spare."""
        ...

    def network(self, bands: int) -> NetworkUse | None:
        """Return what was read over the network so far, of the first bands; None where records come another way."""
        ...


class NetworkUse(NamedTuple):
    """How much was read over the network: bytes, bytes of records that were asked for, requests, and failed requests.

    Records are counted as asked for until all that is used of the cache is here, which an epoch finds when it begins.

    `rate` is the bytes a second while anything was read, `best_rate` those of the best second, and `waited` the seconds
    in which somebody waited for a record. `kept_bytes` of the cache's `total_bytes` are on the disk of this machine.
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
        """How much is on the disk, as text for a progress bar; "" once all is."""
        if self.kept_bytes >= self.total_bytes:
            return ""
        unit, name = (1e9, "GB") if self.total_bytes >= 1e9 else (1e6, "MB")
        return f"cached {self.kept_bytes / unit:,.1f} of {self.total_bytes / unit:,.1f} {name}"
