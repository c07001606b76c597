"""The batches of a run, in their order."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import torch

from tpucache import CachedDataset
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training.feed.feeder import drawer, parts
from tpucache.training.settings import TrainSettings

SETTINGS = TrainSettings(batch_size=16, balance=True, epochs=2)


def rare(cache: Path) -> CachedDataset:
    """A dataset of 38 samples of one class and 10 of each other."""
    dataset = CachedDataset(cache)
    labels = dataset.labels.numpy()
    return dataset.select(
        np.concatenate([np.flatnonzero(labels == label)[: 10 if label else 38] for label in range(4)])
    )


def test_a_balanced_run_shows_each_class_equally_often(cache: Path) -> None:
    dataset = rare(cache)
    labels = torch.cat([labels for _, labels in parts(SETTINGS, dataset, epochs=2)])
    counts = torch.bincount(labels)
    assert torch.bincount(dataset.labels).tolist() == [38, 10, 10, 10]
    assert int(counts.max() - counts.min()) <= 2 * (1 + 4)  # 4 samples of each epoch are in no whole batch


def test_a_balanced_run_continues_at_any_step(cache: Path) -> None:
    dataset = rare(cache)
    whole = [images.clone() for images, _ in parts(SETTINGS, dataset, epochs=2)]
    rest = [images.clone() for images, _ in parts(SETTINGS, dataset, first_step=5, epochs=2)]
    assert 5 + len(rest) == len(whole)
    assert all(torch.equal(one, other) for one, other in itertools.zip_longest(rest, whole[5:]))


def test_a_batch_in_parts_shows_the_pictures_of_the_whole_one(cache: Path) -> None:
    dataset = CachedDataset(cache)
    augment = AugmentSettings(flip=True, crop=True, shift=2, hue=0.1)
    whole = TrainSettings(epochs=2, batch_size=48, augment=augment)
    split = dataclasses.replace(whole, accumulate=3)
    at_once, by_part = drawer(whole, dataset), drawer(split, dataset)
    assert at_once is not None
    assert by_part is not None
    shown = [
        torch.cat([images for images, _ in itertools.islice(parts(settings, dataset, epochs=2), count)])
        for settings, count in ((whole, 4), (split, 12))
    ]
    assert torch.equal(*shown)
    for step in range(4):
        drawn = np.concatenate([by_part(3 * step + part) for part in range(3)])
        np.testing.assert_array_equal(drawn, at_once(step))
