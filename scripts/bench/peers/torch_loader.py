"""What the three peers that are plain PyTorch datasets share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from scripts.bench.peers.reading import BATCH, PASSES, Batches


def shuffled(dataset: Any, workers: int, collate: Callable[[Any], Any] | None = None) -> Batches:
    """Yield shuffled batches of a map-style dataset that has a length, without end."""
    sampler = RandomSampler(dataset, num_samples=PASSES * len(dataset))
    loader = DataLoader(
        dataset,
        BATCH,
        sampler=sampler,
        num_workers=workers,
        collate_fn=collate,
        drop_last=True,
        persistent_workers=workers > 0,
    )
    while True:
        yield from loader
