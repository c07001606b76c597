"""tpucache: CachedLoader over the caches that the photos command built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.bench.peers.reading import BATCH, SIZE, Batches, repeated, run
from tpucache import CachedDataset, CachedLoader
from tpucache.ondevice import decoder


def batches(
    data: Path, _folder: Path, kind: str, threads: int, memory: bool = False, finish: Any = "host", part: int = 1
) -> Batches:
    cache = data / f"cache-{kind}"
    resolution = SIZE // part if part > 1 else None
    dataset = CachedDataset(cache, indices=repeated(len(CachedDataset(cache))), in_memory=memory, resolution=resolution)
    loader = CachedLoader(dataset, BATCH, shuffle=True, drop_last=True, threads=threads, finish=finish)
    while True:
        yield from loader


def finished(images: Any, data: Path, kind: str) -> Any:
    """Return the pixels in the stored size, of fewer frequencies where images were read in another one."""
    if images.ndim > 2:
        return images
    for part in (None, 2, 4):
        dataset = CachedDataset(data / f"cache-{kind}", resolution=SIZE // part if part else None)
        if dataset.packed().record_fields[0].shape == tuple(images.shape[1:]):
            return decoder(dataset, SIZE)(images)
    raise ValueError(f"packed images of {images.shape[1]} bytes are of no size that is read")


if __name__ == "__main__":
    run(batches, finish=finished)
