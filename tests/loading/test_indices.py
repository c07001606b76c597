"""Indices mean what they mean in numpy, or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from signed import signed
from torch.utils.data import DataLoader

from tpucache import CachedDataset, CachedLoader, UsageError

few = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
ends = st.none() | st.integers(-200, 200)
slices = st.builds(slice, ends, ends, st.none() | st.integers(-9, 9).filter(bool))
lists = st.lists(st.integers(-150, 149), max_size=20)
masks = st.lists(st.booleans(), min_size=150, max_size=150)


@pytest.mark.slow
@few
@given(index=slices | lists | lists.map(np.int16) | masks | masks.map(torch.tensor) | masks.map(np.nonzero))
def test_slices_lists_and_masks_choose_what_they_choose_in_numpy(cache: Path, index: object) -> None:
    dataset = CachedDataset(cache)
    plain = index.numpy() if isinstance(index, torch.Tensor) else index
    expected = np.arange(150)[np.array(plain, np.int64) if isinstance(plain, list) and not plain else plain]
    for chosen in (dataset[index], dataset.select(index)):
        assert chosen.numbers.tolist() == dataset.numbers[expected].tolist()


def test_a_mask_of_labels_chooses_the_samples_with_that_label(cache: Path) -> None:
    dataset = CachedDataset(cache)
    for labels in (dataset.labels, dataset.labels.numpy()):
        assert set(dataset.select(labels == 2).labels.tolist()) == {2}
        assert set(CachedDataset(cache, indices=labels == 2).labels.tolist()) == {2}
    part = dataset[dataset.labels == 2]
    assert part[part.labels == 2].paths == part.paths
    assert [label for _, labels in CachedLoader(part[-3:], 2) for label in labels.tolist()] == [2, 2, 2]


@pytest.mark.slow
@few
@given(st.integers(-400, 400), st.integers(1, 150))
def test_one_sample_is_counted_from_either_end_or_an_index_error(cache: Path, index: int, samples: int) -> None:
    dataset = CachedDataset(cache)[:samples]
    if -samples <= index < samples:
        expected = CachedDataset(cache)[index % samples]
        for number in (index, np.int16(index), torch.tensor(index)):
            assert torch.equal(dataset[number][0], expected[0])
    else:
        for choose in (dataset.__getitem__, lambda number: dataset[[number]], lambda number: dataset[[0, number]]):
            with pytest.raises(IndexError):
                choose(index)


def test_a_batch_of_bools_is_no_batch_of_the_first_two_samples(cache: Path) -> None:
    with pytest.raises(UsageError, match="whole numbers"):
        CachedDataset(cache).__getitems__([True, False])


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("variant", [0, "epoch"])
def test_a_dataset_without_samples_is_read_to_its_end(cache: Path, variant: int | str, in_memory: bool) -> None:
    dataset = CachedDataset(cache, variant, in_memory=in_memory)
    for empty in (dataset[:0], dataset.select(()), dataset[np.zeros(150, bool)], CachedDataset(cache, indices=[])):
        assert len(empty) == len(empty.labels) == len(empty.paths) == len(list(empty)) == 0
        assert list(DataLoader(empty, 4)) == []
        for shuffle in (False, True, "block"):
            loader = CachedLoader(empty, 4, shuffle=shuffle, rank=1, world_size=2)
            assert (len(loader), list(loader)) == (0, [])
            CachedLoader(empty, 4, shuffle=shuffle).load_state_dict(loader.state_dict())
    assert dataset.__getitems__([]) == []


@pytest.mark.parametrize("variant", [0, "epoch"])
def test_a_selection_of_a_selection_and_its_epoch_are_its_own(cache: Path, variant: int | str) -> None:
    dataset = CachedDataset(cache, variant)
    dataset.set_epoch(2)
    dataset[4]
    part = dataset[10:60:5]
    again = part[[3, 0, -1]]
    assert again.paths == [dataset.paths[position] for position in (25, 10, 55)]
    part.set_epoch(7)
    assert (dataset.epoch, part.epoch, again.epoch) == (2, 7, 2)
    for at, position in enumerate((25, 10, 55)):
        assert torch.equal(again[at][0], dataset[position][0])
    assert again.digest == dataset[[25, 10, 55]].digest == CachedDataset(cache, variant, [25, 10, 55]).digest


class Inverted(CachedDataset):
    """A dataset as users derive them: samples are changed one by one."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = super().__getitem__(index)
        return 255 - image, label


class InvertedBatches(CachedDataset):
    """A dataset that changes whole batches alone."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(255 - image, label) for image, label in super().__getitems__(indices)]


@pytest.mark.parametrize("kind", [Inverted, InvertedBatches])
def test_what_a_subclass_does_to_a_sample_is_done_however_it_is_read(cache: Path, kind: type[CachedDataset]) -> None:
    plain, changed = CachedDataset(cache), kind(cache)
    expected = 255 - plain[3][0]
    for image in (
        changed[3][0],
        next(iter(DataLoader(changed, 4)))[0][3],
        next(iter(DataLoader(torch.utils.data.Subset(changed, [3]), 4)))[0][0],
        changed.select([3])[0][0],
    ):
        assert torch.equal(image, expected)
    with pytest.raises(UsageError, match="use DataLoader"):
        CachedLoader(changed, 4)


@pytest.mark.parametrize("epoch", [-1, 1.5, True, "1", None])
def test_an_epoch_is_a_whole_number(cache: Path, epoch: object) -> None:
    for target in (CachedDataset(cache, "epoch"), CachedLoader(CachedDataset(cache), 4)):
        with pytest.raises(UsageError, match="epoch"):
            target.set_epoch(epoch)


def test_a_dataset_is_read_from_where_it_was_opened(cache: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(cache.parent)
    dataset = CachedDataset(cache.name)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(dataset[3][0], CachedDataset(cache)[3][0])
    assert torch.equal(dataset[3:4][0][0], CachedDataset(cache)[3][0])


def test_a_selection_is_of_the_cache_that_was_opened(copy: Path) -> None:
    dataset = CachedDataset(copy)
    manifest = copy / "manifest.json"
    manifest.write_text(signed(manifest.read_text().replace('"ant"', '"asp"')))
    assert dataset[:3].classes == dataset.classes
