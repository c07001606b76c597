"""tpucache: CachedLoader over the caches that the photos command built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.bench.peers.reading import BATCH, Batches, repeated, run
from tpucache import CachedDataset, CachedLoader
from tpucache.ondevice import decoder


def batches(data: Path, _folder: Path, kind: str, threads: int, memory: bool = False, finish: Any = "host") -> Batches:
    cache = data / f"cache-{kind}"
    dataset = CachedDataset(cache, indices=repeated(len(CachedDataset(cache))), in_memory=memory)
    loader = CachedLoader(dataset, BATCH, shuffle=True, drop_last=True, threads=threads, finish=finish)
    while True:
        yield from loader


def finished(images: Any, data: Path, kind: str) -> Any:
    return decoder(CachedDataset(data / f"cache-{kind}"))(images) if images.ndim == 2 else images


if __name__ == "__main__":
    run(batches, finish=finished)
