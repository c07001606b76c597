"""`from_hf` gives what a data set of Hugging Face gives, and another cache for each of its states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from writing import BUILDS, changing, write_picture

import tpucache
from tpucache import PictureDataset, SourceError, UsageError

datasets = pytest.importorskip("datasets")

SIZE = 8


@pytest.fixture
def photos() -> Any:
    """Six pictures of two classes, their bytes in the data set."""
    rows = {
        "image": [np.full((10, 12, 3), 40 * number, np.uint8) for number in range(6)],
        "label": [number % 2 for number in range(6)],
    }
    names = datasets.ClassLabel(names=["cat", "dog"])
    return datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image(), "label": names}))


def opened(dataset: Any, **options: Any) -> PictureDataset:
    return tpucache.from_hf(dataset, SIZE, jobs=1, **options)


def test_pictures_labels_and_classes_are_those_of_the_set(photos: Any) -> None:
    dataset = opened(photos)
    assert [image[0, 0, 0].item() for image, _ in dataset] == [0, 40, 80, 120, 160, 200]
    assert dataset.targets == [0, 1] * 3
    assert dataset.classes == ["cat", "dog"]
    assert opened(photos, transform=lambda image: image.size)[0] == ((SIZE, SIZE), 0)


@pytest.mark.parametrize("mode", ["L", "1", "RGB"])
def test_pictures_have_the_mode_that_the_set_states(mode: str) -> None:
    rows = {"image": [Image.new("RGBA", (SIZE, SIZE), (200, 100, 5, 90))], "label": [0]}
    features = datasets.Features({"image": datasets.Image(mode=mode), "label": datasets.Value("int64")})
    dataset = datasets.Dataset.from_dict(rows, features=features)
    expected = np.asarray(dataset[0]["image"].convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(np.asarray(opened(dataset)[0][0]), expected)


def test_a_saved_folder_is_found_again_and_shares_the_cache(photos: Any, tmp_path: Path, capsys: Any) -> None:
    photos.save_to_disk(tmp_path / "saved")
    first = opened(tmp_path / "saved")
    assert opened(str(tmp_path / "saved")).directory == first.directory
    assert opened(datasets.load_from_disk(tmp_path / "saved")).directory == first.directory
    assert capsys.readouterr().err.count(BUILDS) == 1


def test_what_changes_the_set_makes_another_cache(photos: Any) -> None:
    first = opened(photos)
    fewer = opened(photos.select([5, 0]))
    assert torch.equal(fewer[0][0], first[5][0])
    assert fewer.targets == [1, 0]
    other = photos.map(lambda row: {"label": 1 - row["label"]})
    assert opened(other).targets == [1, 0] * 3
    assert len({each.directory for each in (first, fewer, opened(other))}) == 3


def test_files_that_the_set_names_are_watched(root: Path) -> None:
    paths = sorted(map(str, root.rglob("*.png")))
    dataset = datasets.Dataset.from_dict({"image": paths, "label": [0] * 6}).cast_column("image", datasets.Image())
    before = opened(dataset)
    status = os.stat(paths[2])
    write_picture(Path(paths[2]), 30)
    os.utime(paths[2], ns=(status.st_atime_ns, status.st_mtime_ns))
    after = opened(dataset)
    assert [torch.equal(one, other) for (one, _), (other, _) in zip(before, after, strict=True)] == [
        number != 2 for number in range(6)
    ]
    Path(paths[0]).unlink()
    with pytest.raises(SourceError, match=r"a.png, a picture of the data set: No such file"):
        opened(dataset)


def test_files_that_change_while_the_cache_is_made_end_it(root: Path) -> None:
    paths = sorted(map(str, root.rglob("*.png")))
    dataset = datasets.Dataset.from_dict({"image": paths, "label": [0] * 6}).cast_column("image", datasets.Image())
    with changing(paths), pytest.raises(SourceError, match="were changed while its cache was made"):
        opened(dataset)


def test_a_set_that_is_drawn_anew_in_each_run_is_told_how_not_to_be(photos: Any, capsys: Any) -> None:
    for seed, advised in (1, 0), (1, 0), (2, 1):
        opened(photos.train_test_split(0.5, seed=seed)["train"])
        assert capsys.readouterr().err.count("give train_test_split and shuffle a seed=") == advised


def test_what_is_no_single_data_set_of_pictures_is_refused(photos: Any, tmp_path: Path) -> None:
    splits = datasets.DatasetDict({"train": photos, "test": photos})
    splits.save_to_disk(tmp_path / "splits")
    both = photos.add_column("numbers", [[1, 2]] * 6)
    for dataset, error, text in (
        (splits, UsageError, r"has the splits train, test: give one of them, dataset\[SPLIT\]"),
        (tmp_path / "splits", SourceError, "holds the splits test, train"),
        (tmp_path, SourceError, "is not a folder that save_to_disk wrote"),
        (photos.to_iterable_dataset(), UsageError, "a stream has no items by number"),
        (photos.with_format("torch"), UsageError, r"the format or transform 'torch': give dataset.with_format\(None\)"),
        (photos.with_transform(dict), UsageError, "the format or transform 'custom'"),
        (photos.select([]), UsageError, "has no samples"),
        ([1], UsageError, "a list is not a datasets.Dataset: use tpucache.cached"),
        (both, UsageError, "samples have image, numbers, not only a picture"),
    ):
        with pytest.raises(error, match=text):
            opened(dataset)
    with pytest.raises(UsageError, match=r"use tpucache.from_hf"):
        tpucache.cached(photos)
