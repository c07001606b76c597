"""Arriving: the protocol for records that are not on this machine yet: they are on the network or not built yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

#: Yields the numbers of the records that will be read, in reading order: int64 arrays of a few thousand each.
Windows = Callable[[], Iterator[npt.NDArray[np.int64]]]


class Arriving(Protocol):
    """Records of a cache that arrive while the cache is read.

    The reader waits for each record that it reads, and raises an error if the record cannot arrive. So calling these
    methods is optional: they only announce the order in which records are needed. Threads may share one object.
    """

    def expect(
        self, owner: object, variants: Sequence[int], bands: int, windows: Windows, further: Windows | None = None
    ) -> None:
        """Announce the order in which `owner` will read records. Replaces the owner's earlier order.

        `windows` yields record numbers of these variants in the first `bands` frequency bands. If all records of these
        variants and bands are on this machine already, nothing happens. `further` yields the same windows again, then
        those of later epochs: if the disk cannot keep all records, this order decides which ones to keep. Another
        thread may iterate over the windows.
        """
        ...

    def prioritise(self, numbers: npt.NDArray[np.int64]) -> None:
        """Announce that these records are read next. The call may block until they are on this machine."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether records are being fetched as fast as they are read. Then readers put off work that can wait."""
        ...

    def network(self, bands: int) -> NetworkUse | None:
        """Return the network traffic so far; None if the records do not come over a network.

        The sizes on the disk are those of the first `bands` frequency bands.
        """
        ...


class NetworkUse(NamedTuple):
    """Network traffic so far: bytes read, bytes of the records that were asked for, requests, and failed requests.

    `needed_bytes` no longer grows after an epoch has begun with all of its records on this machine's disk.

    `rate` is the bytes per second while anything was read, `best_rate` the bytes of the best second, and `waited` the
    seconds in which at least one reader waited for a record. Of the cache's `total_bytes`, `kept_bytes` are on disk.
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
        """How much of the cache is on disk, as text for a progress bar; "" once the whole cache is on disk."""
        if self.kept_bytes >= self.total_bytes:
            return ""
        unit, name = (1e9, "GB") if self.total_bytes >= 1e9 else (1e6, "MB")
        return f"cached {self.kept_bytes / unit:,.1f} of {self.total_bytes / unit:,.1f} {name}"
