"""Labels arrive as int64 or float32 with the values they were stored with, or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from written import with_labels

from tpucache import CachedDataset, CachedLoader, FormatError


@pytest.mark.parametrize("dtype", ["u1", "i1", ">i4", "<u8", "<f4", ">f8"])
def test_labels_of_any_dtype_keep_their_values(cache: Path, tmp_path: Path, dtype: str) -> None:
    labels = (np.arange(150) % 2).astype(dtype)
    dataset = CachedDataset(with_labels(cache, tmp_path / "copy", labels))
    expected = torch.from_numpy(labels.astype(np.float32 if dtype[1:2] == "f" else np.int64))
    for found in (
        dataset.labels,
        torch.stack([label for _, label in dataset]),
        torch.cat([found for _, found in CachedLoader(dataset, 40)]),
    ):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (4, "i8", "4 classes"),
        (-2, "i8", "4 classes"),
        (2**64 - 1, "u8", "beyond int64"),
        (1e39, "f8", "beyond float32"),
    ],
)
def test_labels_without_a_class_or_beyond_their_dtype_are_refused(
    cache: Path, tmp_path: Path, value: float, dtype: str, message: str
) -> None:
    labels = np.zeros(150, dtype)
    labels[77] = value
    dataset = CachedDataset(with_labels(cache, tmp_path / "copy", labels))
    for read in (lambda: dataset.labels, lambda: dataset[0], lambda: next(iter(CachedLoader(dataset, 4)))):
        with pytest.raises(FormatError, match=message):
            read()


def test_samples_without_a_label_stay_minus_one(cache: Path, tmp_path: Path) -> None:
    labels = np.arange(150) % 4
    labels[3] = -1
    assert CachedDataset(with_labels(cache, tmp_path / "copy", labels))[3][1] == -1


@pytest.mark.parametrize("label", [-5, 2**63 - 1])
def test_a_condition_on_classes_refuses_a_label_without_a_class(cache: Path, tmp_path: Path, label: int) -> None:
    labels = np.arange(150) % 4
    labels[77] = label
    dataset = CachedDataset(with_labels(cache, tmp_path / "copy", labels))
    for condition in ("class == 'bee'", "label == 1"):
        with pytest.raises(FormatError, match="4 classes"):
            dataset.where(condition)
