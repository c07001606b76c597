"""The batches of a run, in their order."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch

from tpucache import CachedDataset
from tpucache.training.feed.feeder import parts
from tpucache.training.settings import TrainSettings, setting_differences, settings_from

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


def test_a_run_from_before_is_not_balanced_and_a_balanced_one_is_another() -> None:
    values = SETTINGS.to_dict()
    del values["balance"]
    assert settings_from(values).balance is False
    assert setting_differences(settings_from(values), SETTINGS) == ["balance False, now True"]
