"""A loader's metrics, as plain numbers."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpucache.loading.reading.record_reader import WaysRead

if TYPE_CHECKING:
    from tpucache.store.reader import NetworkUse

_KEPT_WAITS: Final = 1024
_QUANTILES: Final = (50, 95, 99)


class LoaderMetrics:
    """Counts the batches that a loader hands out. Only the thread that takes the batches may call its methods."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._waits: deque[float] = deque(maxlen=_KEPT_WAITS)
        self._waited = 0.0
        self._batches = self._samples = self._ready = 0
        self._read = WaysRead()

    def note(self, asked: float, ready: int, samples: int, read: WaysRead | None) -> None:
        """Count a batch of `samples` samples, which was requested at `asked`, a value of `time.perf_counter()`.

        `ready` batches were ready at that time. `read` says how many records and bytes were read for the batch.
        """
        now = time.perf_counter()
        if self._began is None:
            self._began = asked
        self._waits.append(now - asked)
        self._waited += now - asked
        self._batches += 1
        self._samples += samples
        self._ready = ready
        if read is not None:
            self._read = WaysRead(*map(operator.add, self._read, read))

    def to_dict(self, queue_size: int, networks: Sequence[NetworkUse], maps: Mapping[str, int]) -> dict[str, Any]:
        """Return the metrics so far, which `BatchLoader.metrics` explains.

        `queue_size` is the size of the queue, `networks` the traffic of each cache at a URL, and `maps` the count
        of shards by method or reason.
        """
        read = self._read
        records = read.memory + read.map + read.file
        waits = np.percentile(self._waits, _QUANTILES).tolist() if self._waits else [0.0] * len(_QUANTILES)
        return {
            "batches": self._batches,
            "samples": self._samples,
            "seconds": 0.0 if self._began is None else time.perf_counter() - self._began,
            "waited_seconds": self._waited,
            **{f"wait_p{quantile}": wait for quantile, wait in zip(_QUANTILES, waits, strict=True)},
            "queue": {"ready": self._ready, "size": queue_size},
            "records": {"memory": read.memory, "map": read.map, "file": read.file},
            "bytes": {
                "memory": read.memory_bytes,
                "map": read.map_bytes,
                "file": read.file_bytes,
                "network": sum(use.bytes for use in networks),
            },
            "maps": dict(maps),
            "hits": (read.memory + read.map) / records if records else 0.0,
            "network": {
                "requests": sum(use.requests for use in networks),
                "failures": sum(use.failures for use in networks),
                "waited_seconds": sum(use.waited for use in networks),
            }
            if networks
            else None,
        }
