"""tpucache: CachedLoader over the caches that the photos command built."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.peers.reading import BATCH, Batches, repeated, run
from tpucache import CachedDataset, CachedLoader


def batches(data: Path, _folder: Path, kind: str, threads: int, memory: bool = False) -> Batches:
    cache = data / f"cache-{kind}"
    dataset = CachedDataset(cache, indices=repeated(len(CachedDataset(cache))), in_memory=memory)
    loader = CachedLoader(dataset, BATCH, shuffle=True, drop_last=True, threads=threads)
    while True:
        yield from loader


if __name__ == "__main__":
    run(batches)
