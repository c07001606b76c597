"""Selections and reading."""

from __future__ import annotations

import os
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab import (
    COUNT,
    array,
    check_photos,
    class_of,
    number_of,
    pixels,
)
from refusals import refuses
from torch.utils.data import DataLoader

from tpucache import CachedDataset, CachedLoader, TpucacheError, UsageError


def test_a_mask_of_labels_as_selection(lab):
    dataset = CachedDataset(lab.shared.cache)
    wanted = [n for n in range(COUNT) if class_of(n) == "cat"]
    masks: list[Any] = [dataset.labels == 2, (dataset.labels == 2).numpy(), (dataset.labels == 2).tolist()]
    for mask in masks:
        check_photos(dataset.select(mask), class_of, wanted)
        check_photos(dataset[mask], class_of, wanted)


def test_floats_texts_and_bools_as_an_index(lab):
    dataset = CachedDataset(lab.shared.cache)
    for value in (
        1.0,
        "3",
        True,
        np.float64(2),
        [0.0, 1.0],
        ["a"],
        np.array([1.5]),
        torch.tensor([1.0]),
        None,
        [[0], [1]],
    ):
        with refuses(UsageError):
            dataset[value]


def test_positions_beyond_both_ends(lab):
    dataset = CachedDataset(lab.shared.cache)
    beyond: list[Any] = [COUNT, -COUNT - 1, 2**62, np.uint64(2**64 - 1)]
    for value in beyond:
        with pytest.raises(IndexError):
            dataset[value]
        with refuses(UsageError):
            dataset.select([value])


def test_slices_lists_and_negative_positions_as_numpy_takes_them(lab):
    dataset, numbers = CachedDataset(lab.shared.cache), np.arange(COUNT)
    order = np.array([number_of(path) for path in dataset.paths])
    for key in (slice(None, None, -1), slice(3, -2, 4), slice(100, 3), [5, -1, 5], np.array([-COUNT, 2], np.int8), []):
        chosen = dataset[key]
        assert [number_of(path) for path in chosen.paths] == (
            order[numbers[key] if len(numbers[key]) else []].tolist() if not isinstance(key, list) or key else []
        ), f"numbers of {key}"
        check_photos(chosen, class_of, [number_of(path) for path in chosen.paths])


def test_writing_into_a_batch_or_a_sample(lab):
    dataset = CachedDataset(lab.shared.cache, in_memory=True)
    dataset[0][0].zero_()
    dataset.labels.zero_()
    for images, labels in CachedLoader(dataset, 5):
        images.zero_()
        labels.zero_()
    for images in DataLoader(dataset, 5):
        images[0].zero_()
    check_photos(dataset, class_of, range(COUNT))


def test_a_relative_path_and_another_working_folder(lab):
    os.chdir(lab.shared.cache.parent)
    dataset = CachedDataset("cache")
    os.chdir("/")
    packed = pickle.loads(pickle.dumps(dataset))
    check_photos(packed, class_of, range(COUNT))
    check_photos(dataset, class_of, range(COUNT))


def test_closing_while_threads_read(lab):
    dataset = CachedDataset(lab.shared.cache, in_memory=True)
    faults: list[str] = []

    def read(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            position = draw.randrange(COUNT)
            try:
                image = dataset[position][0]
            except UsageError:
                return
            except Exception as error:  # noqa: BLE001  # a thread's error would be lost
                faults.append(repr(error))
                return
            if not np.array_equal(array(image), pixels(number_of(dataset.paths[position]))):
                faults.append(f"pixels of position {position}")

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    dataset.close()
    for thread in threads:
        thread.join()
    assert faults == []


#: A process forks while it reads, and its workers stay over three epochs.
FORKING = """
import multiprocessing, sys, warnings
warnings.filterwarnings("ignore", "This DataLoader will create 2 worker")  # torch, where there is one core
sys.path.append(sys.argv[1])
import torch
from torch.utils.data import DataLoader
from lab import COUNT, assert_same, array, number_of, pixels
from tpucache import CachedDataset

def read(start):
    for n in range(start, COUNT):
        assert_same(array(dataset[n][0]), pixels(number_of(dataset.paths[n])))

dataset = CachedDataset(sys.argv[2], in_memory=True)
read(0)
for start in range(4):
    process = multiprocessing.get_context("fork").Process(target=read, args=(start,))
    process.start()
    process.join()
    print(process.exitcode)
augmented = CachedDataset(sys.argv[3], "epoch")
loader = DataLoader(augmented, 6, num_workers=2, persistent_workers=True, multiprocessing_context="fork")
for epoch in range(3):
    augmented.set_epoch(epoch)
    images = torch.cat([images for images, _ in loader])
    for image, path in zip(images, augmented.paths, strict=True):
        assert_same(array(image), 255 - pixels(number_of(path)))
print("three epochs")
"""


@pytest.mark.thorough
def test_forked_processes_and_workers_that_stay_read_what_was_written(lab, run_with_torch):
    done = run_with_torch(FORKING, Path(__file__).parent, lab.shared.cache, lab.shared.augmented)
    assert (done.stdout.split("\n"), done.stderr) == (["0", "0", "0", "0", "three epochs", ""], "")


def test_a_cache_that_is_replaced_while_it_is_open(lab):
    """Another cache at the same place: neither its pixels nor its labels may be taken for the first one's."""
    place = lab.copy(lab.shared.cache)
    dataset = CachedDataset(place)
    place.rename(lab.folder / "moved")
    lab.copy(lab.shared.relabelled)
    with refuses(TpucacheError, "was compacted or built again"):
        check_photos(dataset, class_of, range(COUNT))


def test_a_cache_that_is_removed_while_it_is_open(lab):
    place = lab.copy(lab.shared.cache)
    dataset = CachedDataset(place)
    place.rename(lab.folder / "moved")
    with refuses(TpucacheError, "copy"):
        list(CachedLoader(dataset, 5))
