"""A loader's metrics: as plain numbers, and in the formats of Prometheus and TensorBoard."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpucache.loading.reading.record_reader import WaysRead

if TYPE_CHECKING:
    from tpucache.store.arriving import NetworkUse

_KEPT_WAITS: Final = 1024
_QUANTILES: Final = (50, 95, 99)
#: The first parts of the names of metrics that only grow (counters). All other metrics are gauges.
_COUNTERS: Final = ("batches", "samples", "seconds", "waited_seconds", "records", "bytes", "network")


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


def metric_scalars(metrics: Mapping[str, Any], prefix: str = "loader") -> dict[str, float]:
    """Flatten a loader's metrics to numbers with tags such as `loader/records/map`, for TensorBoard and similar tools.

    `for tag, value in metric_scalars(loader.metrics()).items(): writer.add_scalar(tag, value, step)`.
    """
    return {"/".join((prefix, *names)): value for names, value in _flat(metrics)}


def prometheus_text(metrics: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> str:
    """Return a loader's metrics in Prometheus' text format, version 0.0.4, with these labels.

    Serve it as `text/plain; version=0.0.4`, or write it to a file for the node exporter's textfile collector.
    https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    given = ",".join(f'{name}="{_escaped(value)}"' for name, value in (labels or {}).items())
    lines = []
    for names, value in _flat(metrics):
        is_counter = names[0] in _COUNTERS
        name = "_".join(("tpucache_loader", *names)) + ("_total" if is_counter else "")
        lines.append(f"# TYPE {name} {'counter' if is_counter else 'gauge'}")
        lines.append(f"{name}{{{given}}} {value}" if given else f"{name} {value}")
    return "".join(f"{line}\n" for line in lines)


def _flat(metrics: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from (((name, *rest), each) for rest, each in _flat(value))
        elif value is not None:
            yield (name,), value


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
