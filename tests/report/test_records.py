"""Reading single records without torch, and choosing which to show."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from patience import PATIENCE

from tpucache import CachedDataset, NotACacheError, UsageError
from tpucache.report.records import Records


@pytest.mark.parametrize("codec", ["raw", "png", "zstd", "jpeg"])
def test_records_are_those_that_a_dataset_reads(codec, plain_cache, tmp_path):
    cache = plain_cache(tmp_path / "cache", codec=codec)
    records, dataset = Records(cache), CachedDataset(cache, variant=2)
    for position in (0, 7, 11):
        image, label = dataset[position]
        assert np.array_equal(records.read(position, 2)["image"], image.permute(1, 2, 0).numpy())
        assert records.label(position) == label.item()


@pytest.mark.slow
def test_neither_torch_nor_lmdb_is_needed(drawn):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'lmdb', 'albumentations']))\n"
        "from tpucache import preview_cache, report_cache\n"
        "print(preview_cache(sys.argv[1]).size, len(report_cache(sys.argv[1]).html))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, drawn], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_without_pillow_the_error_names_it(plain):
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "import tpucache\n"
        "try:\n    tpucache.preview_cache(sys.argv[1])\n"
        "except tpucache.DependencyError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, plain], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert "pip install 'pillow>=10.1'" in done.stdout, done.stderr


def test_every_class_is_shown_before_one_is_shown_twice(plain_cache, tmp_path):
    labels = np.array([0] * 15 + [1, 2, 3, 3, 1])
    records = Records(plain_cache(tmp_path / "cache", samples=20, variants=1, labels=labels))
    for seed in range(5):
        chosen = records.choose(6, seed)
        assert chosen == sorted(set(chosen))
        assert sorted(labels[chosen].tolist())[:1] == [0]
        assert all(count in (1, 2) for count in np.bincount(labels[chosen], minlength=4))


def test_the_choice_is_a_function_of_the_seed(plain):
    records = Records(plain)
    assert records.choose(5, 1) == records.choose(5, 1)
    assert len({tuple(records.choose(5, seed)) for seed in range(9)}) > 1
    assert records.choose(100) == list(range(12))


def test_samples_of_one_class_are_chosen_by_its_name(plain, drawn, hostile):
    assert Records(plain).choose(9, class_name=hostile) == [1, 5, 9]
    assert Records(drawn).choose(9, class_name="ant") == [0, 2, 4]  # several classes a sample


def test_an_unknown_class_is_an_error_with_the_nearest_names(plain):
    with pytest.raises(UsageError, match=r"no class 'ants': it has 4 classes, such as 'ant'"):
        Records(plain).choose(1, class_name="ants")


def test_a_dataset_shows_its_own_samples_only(plain):
    assert Records(CachedDataset(plain, indices=[7, 3, 3])).choose(9) == [3, 7]


def test_a_folder_without_a_cache_is_refused(tmp_path):
    with pytest.raises(NotACacheError):
        Records(tmp_path)
