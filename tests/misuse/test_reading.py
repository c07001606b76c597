"""Selections and reading."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab import COUNT, array, assert_same, check_photos, class_of, number_of, pixels
from refusals import refuses
from torch.utils.data import DataLoader, Subset

from tpucache import CachedDataset, CachedLoader, TpucacheError, UsageError

#: What is done with a dataset, and a word of the refusal.
REFUSED: list[tuple[Callable[[CachedDataset], object], str]] = [
    *((lambda d, value=value: d[value], "")
      for value in (1.0, "3", True, np.float64(2), [0.0, 1.0], ["a"], np.array([1.5]), torch.tensor([1.0]), None,
                    [[0], [1]])),
    *((lambda d, value=value: d.select([value]), "") for value in (COUNT, -COUNT - 1, 2**62, np.uint64(2**64 - 1))),
    *((lambda d, value=value: CachedDataset(d.cache.directory, value), "variants")
      for value in (3, -1, True, "1", None, 1.0, "Epoch")),
    (lambda d: d.select(np.ones(COUNT - 1, bool)), str(COUNT)),
    (lambda d: CachedDataset(d.cache.directory, indices=[0, -1]), "-1"),
    (lambda d: CachedDataset(d.cache.directory, in_memory="no"), "in_memory"),  # type: ignore[arg-type]  # as a user may
]  # fmt: skip


def test_what_cannot_be_meant_is_refused(lab):
    dataset = CachedDataset(lab.shared.cache)
    for act, word in REFUSED:
        with refuses(UsageError, word):
            act(dataset)
    with pytest.raises(IndexError):
        dataset[COUNT]


def test_selections_are_those_of_numpy(lab):
    dataset = CachedDataset(lab.shared.cache)
    order = np.array([number_of(path) for path in dataset.paths])
    check_photos(dataset, class_of, range(COUNT))
    keys: list[Any] = [
        slice(None, None, -1),
        slice(3, -2, 4),
        slice(100, 3),
        [5, -1, 5],
        np.array([-COUNT, 2], np.int8),
    ]
    keys += [(dataset.labels == 2), (dataset.labels == 2).numpy(), np.zeros(0, np.int64)]
    for key in keys:
        chosen = dataset[key]
        wanted = order[key if isinstance(key, slice) else np.asarray(key)]
        assert [number_of(path) for path in chosen.paths] == wanted.tolist()
        check_photos(chosen, class_of, [number_of(path) for path in chosen.paths])
    nested = Subset(Subset(dataset.select(range(1, 20)), [3, 5, -1]), [2, 0])
    for image, number in zip(next(iter(CachedLoader(nested, 2)))[0], (order[19], order[4]), strict=True):
        assert_same(array(image), pixels(number), f"photograph {number}")
    empty = dataset.select([])
    assert len(list(CachedLoader(empty, 4, shuffle=True))) == len(list(DataLoader(empty, 4))) == 0


def test_what_is_done_with_batches_changes_no_cache(lab):
    dataset = CachedDataset(lab.shared.cache, in_memory=True)
    kept = list(CachedLoader(dataset, 5, threads=3, prefetch=4))
    dataset[0][0].zero_()
    dataset.labels.zero_()
    for images, labels in (*CachedLoader(dataset, 5), *DataLoader(dataset, 5)):
        images.zero_()
        labels.zero_()
    check_photos(dataset, class_of, range(COUNT))
    for image, path in zip(torch.cat([images for images, _ in kept]), dataset.paths, strict=True):
        assert_same(array(image), pixels(number_of(path)), path)


def test_a_relative_path_a_link_and_another_working_folder(lab):
    os.chdir(lab.shared.cache.parent)
    dataset = CachedDataset("cache")
    os.chdir("/")
    (lab.folder / "a link").symlink_to(lab.shared.cache)
    for each in (dataset, pickle.loads(pickle.dumps(dataset)), CachedDataset(str(lab.folder / "a link"))):
        check_photos(each, class_of, range(COUNT))


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


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_cache_that_is_replaced_or_removed_while_it_is_open(lab, is_replaced):
    place = lab.copy(lab.shared.cache)
    dataset = CachedDataset(place)
    place.rename(lab.folder / "moved")
    if is_replaced:
        lab.copy(lab.shared.relabelled)
    with refuses(TpucacheError, "was compacted or built again" if is_replaced else "copy"):
        check_photos(dataset, class_of, range(COUNT))
