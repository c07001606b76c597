"""Arriving: the protocol for records that are not on this machine yet: they are on the network or not built yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

#: A function without arguments. It returns an iterator over the index row numbers of the records that a loader will
#: read, in reading order: int64 arrays of a few thousand numbers each. One such array is called a window.
Windows = Callable[[], Iterator[npt.NDArray[np.int64]]]


class Arriving(Protocol):
    """Records of a cache that arrive while the cache is read.

    The reader waits for each record that it reads, and raises an error if the record cannot arrive. So calling these
    methods is optional: they only announce the order in which records are needed. Threads may share one object.
    """

    def expect(self, owner: object, variants: Sequence[int], windows: Windows) -> None:
        """Announce the order in which `owner`, such as a loader, will read records. Replaces the owner's earlier
        order.

        `windows()` yields arrays of index row numbers, in reading order. All these records belong to `variants`.
        Another thread may run the iterator.
        """
        ...

    @property
    def is_busy(self) -> bool:
        """Whether records are being fetched or built right now. Readers should then put off work that can wait."""
        ...

    def network(self) -> NetworkUse | None:
        """Return the network traffic so far; None if the records do not come over a network."""
        ...


class NetworkUse(NamedTuple):
    """The network traffic of one cache in this process so far, and how much of the cache is on this machine's disk.

    `bytes` were read from the URL by `requests` successful requests; `failures` requests failed. `needed_bytes` is the
    size of the records that readers asked for; a read is not counted if all shards that it needs are known to be
    complete on the disk. `rate` is in bytes per second, counting only the time in which a request ran, and `best_rate`
    is the rate of the best second. `waited` is the time in seconds that readers waited for records, added up over all
    threads. Of the cache's `total_bytes`, about `kept_bytes` are on the disk, estimated from the number of records.
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
