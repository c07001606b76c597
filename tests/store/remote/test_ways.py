"""Whatever way a cache at a URL is read, and whatever of it is kept, it gives what a local copy gives."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from thorough import thorough
from torch.utils.data import DataLoader

from tpucache import CachedDataset, CachedLoader, MixedLoader
from tpucache.store.remote import fetch

SAMPLES, VARIANTS = 48, 3
Opened = Callable[..., CachedDataset]


@pytest.fixture
def cache(noise: Path) -> Path:
    return noise


def batches(dataset: CachedDataset, epochs: int = 1, **options: object) -> list[tuple[bytes, list[int]]]:
    """Return the images and labels of each batch of some epochs."""
    loader = CachedLoader(dataset, 16, **options)
    return [(images.numpy().tobytes(), labels.tolist()) for _ in range(epochs) for images, labels in loader]


def mixed_batches(dataset: CachedDataset) -> list[object]:
    """Return the images of a loader that reads the dataset twice."""
    loaders = [CachedLoader(dataset, 8, shuffle=shuffle) for shuffle in (True, "block")]
    return [images.tolist() for images, _ in MixedLoader(loaders, shares=[3, 1])]


def hinted_samples(dataset: CachedDataset) -> list[object]:
    """Return each sample by itself, after the kernel was asked to read all of them."""
    dataset.hint(np.arange(len(dataset)), 0)
    dataset.prepare(2)
    return [dataset[position][0].tolist() for position in range(len(dataset))]


WAYS: dict[str, Callable[[CachedDataset], object]] = {
    "single": lambda dataset: [image.tolist() for image, _ in dataset],
    "several": lambda dataset: [image.tolist() for image, _ in dataset.__getitems__([5, SAMPLES - 1, 25, 3, 5])],
    "selected": lambda dataset: [image.tolist() for image, _ in dataset.select(np.arange(SAMPLES) % 3 == 1)],
    "hinted": hinted_samples,
    "fields": lambda dataset: np.concatenate([*dataset.field_batches("image")]).tolist(),
    "records": lambda dataset: [
        bytes(dataset.cache.reader.read(dataset.cache.index[np.array([number])][0]))
        for number in range(0, VARIANTS * SAMPLES, 5)
    ],
    "DataLoader": lambda dataset: [images.tolist() for images, _ in DataLoader(dataset, 16)],
    "file": batches,
    "block": lambda dataset: batches(dataset, 2, shuffle="block", window=32),
    "full": lambda dataset: batches(dataset, 2, shuffle=True),
    "threads": lambda dataset: batches(dataset, threads=6, prefetch=0),
    "rank": lambda dataset: batches(dataset, 2, shuffle="block", rank=1, world_size=3),
    "mixed": mixed_batches,
    "variants": lambda dataset: [batches(dataset.in_variant(variant)) for variant in ("epoch", 2)],
}
#: One for each function that reads: samples, fields and batches.
USUAL = ("single", "fields", "full")


@pytest.mark.parametrize("way", ["block", "rank", *thorough("file", "full")])
@pytest.mark.parametrize("kept", [12 << 10, *thorough(None, 0)])
def test_batches_are_those_of_a_local_copy_however_much_is_kept(
    opened: Opened, cache: Path, monkeypatch: pytest.MonkeyPatch, kept: int | None, way: str
) -> None:
    monkeypatch.setattr(fetch, "_LEAST_IN_MEMORY", 2)
    monkeypatch.setattr(fetch, "_MOST_MEMORY", 0)
    expected = WAYS[way](CachedDataset(cache, "epoch"))
    assert WAYS[way](opened(variant="epoch", cache_bytes=kept)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "in_memory"),
    [
        *((way, False) for way in USUAL),
        *thorough(*((way, False) for way in WAYS if way not in USUAL), ("single", True)),
        ("block", True),
    ],
)
def test_no_way_of_reading_sees_the_holes_of_missing_pieces(
    opened: Opened, cache: Path, way: str, in_memory: bool
) -> None:
    dataset = opened(in_memory=in_memory)
    fetcher = dataset.cache.reader.fetcher
    pieces, kept = fetcher._pieces, fetcher.local
    for piece in range(0, len(pieces), 2):
        assert kept.make_room(piece)
        assert kept.write(piece, pieces[piece], fetcher._link.read(pieces[piece]))
    hole = pieces[1]
    assert not any(
        os.pread(kept.file(hole.shard).number, int(row["length"]), int(row["offset"]))[-1] for row in hole.rows
    )
    assert WAYS[way](dataset) == WAYS[way](CachedDataset(cache, in_memory=in_memory))
