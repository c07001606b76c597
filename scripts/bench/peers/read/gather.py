"""The machine's limit: rows of an array in memory, taken in random order into batches used again and again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from scripts.bench.peers.reading import BATCH, Array, Batches, load, repeated, run
from tpucache.native import gather


def batches(data: Path, _folder: Path, threads: int) -> Batches:
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


if __name__ == "__main__":
    run(batches)
