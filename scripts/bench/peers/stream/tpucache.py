"""tpucache: a cache at a URL, its bytes in the codec's packed form, shuffled in blocks, by default options else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

# On no clock: everybody else imports what is needed at the start, too.
import llvmlite.binding  # noqa: F401
import torch  # noqa: F401

import tpucache.store.remote.cache  # noqa: F401
from scripts.bench.peers.streaming import BATCH, SIZE, Epoch, run
from tpucache import CachedDataset, CachedLoader


def open_url(url: str, folder: Path, threads: int, part: int = 1) -> Callable[[], Epoch]:
    resolution = SIZE // part if part > 1 else None
    dataset = CachedDataset(url, resolution=resolution, cache_dir=folder if "://" in url else None)
    is_packed = dataset.manifest.recipe["codec"] != "raw"
    loader = CachedLoader(dataset, BATCH, shuffle="block", threads=threads, finish="device" if is_packed else "host")
    return lambda: (len(labels) for _, labels in loader)


if __name__ == "__main__":
    run(open_url)
