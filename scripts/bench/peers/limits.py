"""What the machine allows at most: a copy of rows of an array in memory, and a link whose bytes are thrown away."""

from __future__ import annotations

import http.client
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from scripts.bench.peers.protocol import serve
from scripts.bench.peers.reading import BATCH, Array, Batches, load, reader, repeated
from scripts.bench.peers.streaming import Epoch, streamer

_PART = 8 << 20
_CONNECTIONS = 8


def batches(data: Path, _folder: Path, threads: int) -> Batches:
    """Take rows in random order into batches that are used again and again."""
    from tpucache.native import gather

    images, labels = load(data, mode=None)
    targets = [np.empty((BATCH, *images.shape[1:]), np.uint8) for _ in range(threads + 1)]
    order = _rows(len(images))

    def fill(slot: int, rows: Array) -> Array:
        gather(images, rows, targets[slot])
        return rows

    with ThreadPoolExecutor(threads) as pool:
        pending = [pool.submit(fill, slot, next(order)) for slot in range(len(targets))]
        while True:
            for slot, target in enumerate(targets):
                rows = pending[slot].result()
                yield target, labels[rows]
                pending[slot] = pool.submit(fill, slot, next(order))


def _rows(samples: int) -> Iterator[Array]:
    rng = np.random.default_rng(0)
    while True:
        rows = rng.permutation(repeated(samples))
        for start in range(0, len(rows) - BATCH + 1, BATCH):
            yield rows[start : start + BATCH]


def open_url(url: str, _folder: Path, bytes: int) -> Callable[[], Epoch]:
    """Ask for parts of one file over eight connections, and throw them away."""
    os.environ["no_proxy"] = "*"
    parts = urlsplit(url)

    def read(starts: Iterator[int]) -> int:
        connection = http.client.HTTPConnection(parts.netloc)
        buffer = memoryview(bytearray(1 << 20))
        done = 0
        for start in starts:
            connection.request("GET", parts.path, headers={"Range": f"bytes={start}-{min(start + _PART, bytes) - 1}"})
            with connection.getresponse() as answer:
                while count := answer.readinto(buffer):
                    done += count
        connection.close()
        return done

    def epoch() -> Iterator[int]:
        starts = iter(range(0, bytes, _PART))
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            yield sum(pool.map(read, itertools.repeat(starts, _CONNECTIONS)))

    return epoch


if __name__ == "__main__":
    serve(read=reader(batches), stream=streamer(open_url))
