"""What many hosts read from one object store, simulated for `scripts.bench scale`.

The order of samples, the pieces, the parts of them that are asked for, and the forecast are the package's own, over a
cache of millions of rows. Simulated are each host's disk, of which pieces it keeps, and the store: what it answers to
all hosts together, in requests and in bytes a second. Times are those of an epoch in which everybody works steadily.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tpucache import CachedDataset, CachedLoader
from tpucache.store.index import Rows
from tpucache.store.remote.pieces import Pieces
from tpucache.store.remote.plan import FetchPlan, Forecast

EPOCHS: Final = 16
_COUNTED: Final = 8  # the last ones, once disks are full
_AT_ONCE: Final = 16  # requests of a host
_SAMPLED: Final = 2  # hosts that stand for all

Figures = dict[str, Any]


@dataclass(frozen=True)
class ObjectStore:
    """Seconds an answer, bytes a second of a host, and bytes and requests a second of all hosts together."""

    latency: float
    host_rate: float
    rate: float
    requests: float


def stream_hosts(
    dataset: CachedDataset, store: ObjectStore, hosts: int, batch: int, device_rate: int, shares: tuple[float, ...]
) -> list[Figures]:
    """Return what the hosts read in an epoch and how fast that is, by what is known ahead and what a disk keeps."""
    cache = dataset._open_reader.cache
    pieces = Pieces(cache)
    room = len(pieces) * len(dataset) / len(cache.index)  # pieces of the samples that are in use
    samples = len(dataset) // (batch * hosts) * batch * hosts  # of an epoch, without a last short batch
    rows: list[Figures] = []
    needed = 0.0
    for name, read in READERS.items():
        for share in shares if read is not _by_record else shares[:1]:
            found = [
                read(_windows(dataset, hosts, batch, rank), pieces, round(share * room))
                for rank in range(0, hosts, -(-hosts // _SAMPLED))
            ]
            requests, size = (statistics.mean(each) * hosts for each in zip(*found, strict=True))
            needed = size if read is _by_record else needed
            seconds = {
                "accelerators": samples / hosts / device_rate,
                "latency": requests / hosts * store.latency / _AT_ONCE,
                "host": size / hosts / store.host_rate,
                "store, bytes": size / store.rate,
                "store, requests": requests / store.requests,
            }
            limit = max(seconds, key=lambda part: seconds[part])
            rows.append(
                {
                    "reader": name,
                    "hosts": hosts,
                    "share": share,
                    "gigabytes": size / 1e9,
                    "of_needed": size / needed,
                    "requests": requests,
                    "images_per_second": samples / hosts / seconds[limit],
                    "limit": limit,
                }
            )
    return rows


def _windows(dataset: CachedDataset, hosts: int, batch: int, rank: int) -> list[list[Rows]]:
    """Return the index rows that a host reads, for each epoch window by window."""
    options: Any = {"shuffle": "block", "window": batch, "rank": rank, "world_size": hosts, "drop_last": True}
    loader = CachedLoader(dataset, batch, **options)
    index = dataset._open_reader.cache.index
    epochs: list[list[Rows]] = [[] for _ in range(EPOCHS)]
    for positions, epoch, shared in loader._begin(is_counted=True).expected(EPOCHS):
        epochs[epoch].append(index[dataset._rows(positions, epoch, shared)])
    return epochs


def _by_record(epochs: list[list[Rows]], _pieces: Pieces, _room: int) -> tuple[float, float]:
    """Ask for each record when it is read, and keep none; return the requests and bytes of an epoch."""
    counts = [[(len(rows), int(rows["length"].sum())) for rows in windows] for windows in epochs[-_COUNTED:]]
    return _mean([tuple(map(sum, zip(*each, strict=True))) for each in counts])


def _by_piece(epochs: list[list[Rows]], pieces: Pieces, room: int, *, drops: bool) -> tuple[float, float]:
    """Read whole pieces; the first are kept, or, where it `drops`, those that were used last."""
    kept: OrderedDict[int, None] = OrderedDict()
    counts = []
    for windows in epochs:
        requests = size = 0
        for rows in windows:
            for piece in np.unique(pieces.of(rows)[1]).tolist():
                if piece in kept:
                    kept.move_to_end(piece)
                    continue
                requests, size = requests + 1, size + pieces.bytes_of(piece)
                if room and drops and len(kept) == room:
                    kept.popitem(last=False)
                if len(kept) < room:
                    kept[piece] = None
        counts.append((requests, size))
    return _mean(counts[-_COUNTED:])


def _by_plan(epochs: list[list[Rows]], pieces: Pieces, room: int) -> tuple[float, float]:
    """Read the parts of pieces that are needed, and keep what is needed soonest, as `Fetcher` does."""
    windows = [rows for each in epochs for rows in each]
    plan = FetchPlan(iter(windows), pieces)
    forecast = Forecast(iter(windows), pieces, len(windows) * len(pieces))
    is_here = np.zeros(len(pieces.cache.index), bool)
    kept: set[int] = set()
    counts = []
    for number, rows in enumerate(windows, 1):
        forecast.go_to(number)
        requests = size = 0
        needed = pieces.of(rows)[1]
        now = {*needed.tolist()}
        for piece, run in plan._runs(rows, needed, np.unique(needed)):
            if is_here[run.numbers].all():
                continue
            requests, size = requests + 1, size + run.stop - run.start
            if piece not in kept and len(kept) >= room > 0:
                later = forecast.later_than(piece, np.fromiter(kept, np.int64))
                if (other := next((each for each in later if each not in now), None)) is not None:
                    kept.remove(other)
                    is_here[pieces.run(other).numbers] = False
            if piece in kept or len(kept) < room:
                kept.add(piece)
                is_here[run.numbers] = True
        counts.append((requests, size))
    each = len(epochs[0])
    by_epoch = [tuple(map(sum, zip(*counts[at : at + each], strict=True))) for at in range(0, len(counts), each)]
    return _mean(by_epoch[-_COUNTED:])


def _mean(epochs: list[Any]) -> tuple[float, float]:
    requests, size = zip(*epochs, strict=True)
    return statistics.mean(requests), statistics.mean(size)


def _first_kept(epochs: list[list[Rows]], pieces: Pieces, room: int) -> tuple[float, float]:
    return _by_piece(epochs, pieces, room, drops=False)


def _last_used(epochs: list[list[Rows]], pieces: Pieces, room: int) -> tuple[float, float]:
    return _by_piece(epochs, pieces, room, drops=True)


READERS: Final[dict[str, Callable[[list[list[Rows]], Pieces, int], tuple[float, float]]]] = {
    "each record when it is read": _by_record,
    "whole pieces, the last used kept": _last_used,
    "whole pieces, the first kept": _first_kept,
    "tpucache: parts, the needed soonest kept": _by_plan,
}


def to_table(rows: list[Figures]) -> list[list[str]]:
    """Return the rows of the table, its heading first."""
    table = [["hosts", "reader", "kept", "GB an epoch", "of needed", "requests", "images/s of a host", "limit"]]
    for row in rows:
        table.append(
            [
                *(f"{row['hosts']}", row["reader"], f"{row['share']:.0%}", f"{row['gigabytes']:,.0f}"),
                *(f"{row['of_needed']:.2f}", f"{row['requests'] / 1e3:,.0f}k"),
                *(f"{row['images_per_second']:,.0f}", row["limit"]),
            ]
        )
    return table
