"""Columns come with the fields and the label of a sample, whatever the labels are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from written import with_labels

from tpucache import CachedDataset, CachedLoader, UsageError
from tpucache.loading.dataset import COLUMNS
from tpucache.store.manifest import Statistics


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("labels", [0, 1, 3], ids=["a class", "a list of one number", "three numbers"])
def test_a_batch_has_labels_and_columns_of_its_samples(cache: Path, tmp_path: Path, labels: int, width: int) -> None:
    rng = np.random.default_rng(0)
    numbers, described = rng.random((150, labels)).astype(np.float32), {"classes": (), "statistics": Statistics()}
    place = with_labels(cache, tmp_path / "cache", numbers, **described) if labels else cache
    plain = CachedDataset(place)[::-2]
    values = rng.random((75, width)).astype(np.float32)
    dataset = plain.with_columns(values)
    assert dataset.column_width == width
    assert plain.column_width == 0
    assert torch.equal(dataset.labels, plain.labels)
    order = []
    for batch, (_, expected) in zip(CachedLoader(dataset, 20), CachedLoader(plain, 20), strict=True):
        assert torch.equal(batch["label"], expected)
        assert batch["label"].dtype == expected.dtype
        order.append(batch[COLUMNS])
    assert torch.equal(torch.cat(order), torch.from_numpy(values))
    sample = dataset[7]
    assert torch.equal(sample["label"], plain[7][1])
    assert torch.equal(sample[COLUMNS], torch.from_numpy(values[7]))


@pytest.mark.parametrize(
    ("chosen", "values", "message"),
    [
        ([0, 1], [[1.0]], "2 samples"),  # numpy would give this row to both
        ([0, 1], [1.0, 2.0], "2 samples"),
        ([0, 1], [[1.0], [2.0], [3.0]], "2 samples"),
        ([0, 0, 1], [[1.0], [2.0], [3.0]], "several times"),
        ([0, 0, 1], [[np.nan], [2.0], [3.0]], "several times"),
    ],
)
def test_columns_that_are_not_one_row_for_each_sample_are_refused(
    cache: Path, chosen: list[int], values: list[object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        CachedDataset(cache)[chosen].with_columns(np.array(values))
    again = CachedDataset(cache)[[0, 0, 1]].with_columns(np.array([[np.nan], [np.nan], [3.0]]))
    assert again[2][COLUMNS].tolist() == [3.0]
