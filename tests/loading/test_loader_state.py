"""A loader's state continues the same batches, or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thorough import thorough
from written import with_labels

from tpucache import CachedDataset, CachedLoader, Recipe, UsageError, build_cache
from tpucache.loading import loader as loader_module
from tpucache.loading.order import global_batches, rank_slice


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few samples, as caches of many images have relative to their size."""
    monkeypatch.setattr(loader_module, "CHUNK_BYTES", 100_000)


@pytest.fixture
def black(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An augmentation whose images take far fewer bytes than clean ones."""
    (tmp_path / "black_by_test.py").write_text("def black(image, rng):\n    image[...] = 0\n    return image\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "black_by_test:black"


def numbers(batches: Iterator[Any], dataset: CachedDataset) -> list[int]:
    """Tell which samples batches hold, by their bytes: all images of the cache differ."""
    known = {image.contiguous().numpy().tobytes(): at for at, (image, _) in enumerate(dataset)}
    return [known[image.contiguous().numpy().tobytes()] for images, _ in batches for image in images]


def stopped(loader: CachedLoader, batches: int) -> dict[str, int | str]:
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return loader.state_dict()


def test_a_state_of_labels_that_were_standardised_by_other_numbers_is_refused(tmp_path: Path) -> None:
    items = [(np.full((8, 8, 3), number, np.uint8), number + 0.5) for number in range(8)]
    build_cache(items, tmp_path / "cache", Recipe(size=8), jobs=1)
    stored = CachedDataset(tmp_path / "cache")
    shown = stored.with_standardised_labels([4.0], [2.0])
    state = json.loads(json.dumps(stopped(CachedLoader(shown, 2), 3)))
    for other in (stored, stored.with_standardised_labels([4.0], [3.0])):
        with pytest.raises(UsageError, match=r"standardised by other numbers: \[\[4.0\], \[2.0\]\] in the state"):
            CachedLoader(other, 2).load_state_dict(state)
        loader = CachedLoader(other, 2)
        loader.load_state_dict({name: value for name, value in state.items() if name != "scale"})  # of before
        assert len(list(loader)) == 1
    with pytest.raises(UsageError, match="by other numbers: none in the state"):
        CachedLoader(shown, 2).load_state_dict(stopped(CachedLoader(stored, 2), 3))
    with pytest.raises(UsageError, match="by other numbers: 4 in the state"):
        CachedLoader(shown, 2).load_state_dict({**state, "scale": 4})
    for numbers in (([4.0], [2.0]), ([4.0 + 1e-12], [2.0])):  # as the mean that another library's sum gives
        CachedLoader(stored.with_standardised_labels(*numbers), 2).load_state_dict(state)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shuffle", [*thorough(True), "block"])
def test_an_epoch_continues_in_its_order_when_variants_were_added(
    photos: Path, tmp_path: Path, black: str, shuffle: str
) -> None:
    cache = tmp_path / "cache"
    build_cache(photos, cache, Recipe(size=32, codec="png", variants=1, augment=black), jobs=1)
    before = CachedDataset(cache)
    loader = CachedLoader(before, 30, shuffle=shuffle, window=60)
    iterator = iter(loader)
    seen = numbers(iter([next(iterator) for _ in range(3)]), before)
    state = loader.state_dict()
    build_cache(photos, cache, Recipe(size=32, codec="png", variants=3, augment=black), jobs=1)
    after = CachedDataset(cache)
    assert after.manifest.augmented == 3
    rest = CachedLoader(after, 30, shuffle=shuffle, window=60)
    rest.load_state_dict(state)
    assert sorted(seen + numbers(iter(rest), after)) == list(range(150))
    assert after.digest == before.digest
    turning = CachedLoader(CachedDataset(cache, "epoch"), 30, shuffle=shuffle, window=60)
    with pytest.raises(UsageError, match="digest"):
        turning.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_the_chunks_of_a_state_are_kept_where_records_have_another_size(cache: Path, monkeypatch) -> None:
    dataset = CachedDataset(cache)
    loader = CachedLoader(dataset, 30, shuffle="block", window=60)
    iterator = iter(loader)
    seen = numbers(iter([next(iterator)]), dataset)
    state = loader.state_dict()
    monkeypatch.setattr(CachedDataset, "usual_record_bytes", 5000)
    other = CachedLoader(dataset, 30, shuffle="block", window=60)
    other.load_state_dict(state)
    assert sorted(seen + numbers(iter(other), dataset)) == list(range(150))
    assert other.state_dict()["chunk"] == state["chunk"]


def test_a_state_of_another_cache_or_of_no_loader_is_refused(cache: Path) -> None:
    loader = CachedLoader(CachedDataset(cache), 10, shuffle="block")
    for name, values in {
        "chunk": [0, None, "7"], "digest": ["0" * 64, None], "samples": [3], "epoch": ["1"], "position": [151, None],
        "seed": [-1], "order": ["full"],
    }.items():  # fmt: skip
        for value in values:
            with pytest.raises(UsageError, match=name):
                loader.load_state_dict({**loader.state_dict(), name: value})


def test_a_state_of_other_samples_or_of_another_order_is_refused(cache: Path, tmp_path: Path) -> None:
    dataset, fold = CachedDataset(cache), np.arange(150) % 5
    labels = (dataset.labels.numpy() + (np.arange(150) == 7)) % 4

    def loader_of(shown: CachedDataset, window: int = 40) -> CachedLoader:
        return CachedLoader(shown, 10, shuffle="block", window=window)

    for shown, others in (
        (dataset.select(fold != 0), [dataset.select(fold != 1), dataset.select(np.flatnonzero(fold)[::-1])]),
        (dataset, [CachedDataset(with_labels(cache, tmp_path / "relabelled", labels)), CachedDataset(cache, 1)]),
    ):
        state = stopped(loader_of(shown), 3)
        loader_of(shown).load_state_dict(state)
        for said, refusing in (
            ("digest", [loader_of(other) for other in others]),
            ("order", [loader_of(shown, window) for window in (10, 41)]),
        ):
            for loader in refusing:
                with pytest.raises(UsageError, match=said):
                    loader.load_state_dict(state)


def test_a_seed_of_numpy_can_be_saved_and_loaded(cache: Path) -> None:
    loader = CachedLoader(CachedDataset(cache), np.int64(10), shuffle=True, seed=np.int64(3))
    loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))


@pytest.mark.slow
@given(st.integers(0, 90), st.integers(0, 90), st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_every_rank_has_samples_in_each_global_batch(start, samples, batch, ranks, drop_last) -> None:
    size = batch * ranks
    bounds = list(global_batches(start, samples, size, ranks, drop_last))
    left = max(0, samples - start)
    assert len(bounds) == (left // size if drop_last else -(-left // size))
    covered = [position for first, stop in bounds for position in range(first, stop)]
    assert covered == list(range(start, samples))[: len(covered)]
    assert drop_last or len(covered) == left
    if drop_last or (left >= ranks and (batch > 1 or left % size == 0)):
        for first, stop in bounds:
            shares = [rank_slice(first, stop, rank, ranks) for rank in range(ranks)]
            assert all(share.start < share.stop <= share.start + batch for share in shares)


def test_a_rest_that_cannot_be_shared_is_refused_when_resuming(cache: Path) -> None:
    dataset = CachedDataset(cache)
    state = {**CachedLoader(dataset, 1).state_dict(), "position": 147}
    loader = CachedLoader(dataset, 5, rank=3, world_size=5)
    with pytest.raises(UsageError, match="3 samples for 5 ranks"):
        loader.load_state_dict(state)
    with pytest.raises(UsageError, match="1 samples for 5 ranks"):
        loader.load_state_dict({**state, "position": 149})
    loader.load_state_dict({**state, "position": 145})
    single = CachedLoader(dataset, 1, rank=3, world_size=5)
    with pytest.raises(UsageError, match="3 samples for 5 ranks"):
        single.load_state_dict({**state, "position": 122})  # five whole batches, and then too few


def test_a_subset_of_a_subset_is_read_like_torch_reads_it(cache: Path) -> None:
    dataset = CachedDataset(cache)
    subset = torch.utils.data.Subset(torch.utils.data.Subset(dataset, [9, 4, -1, 30]), [2, 0, 2])
    ((images, labels),) = CachedLoader(subset, 4)
    assert len(labels) == 3
    for at in range(3):
        assert torch.equal(images[at], subset[at][0])
        assert labels[at] == subset[at][1]


class Doubled(torch.utils.data.Subset):
    """A subset that changes what it shows."""

    def __getitem__(self, index):
        return [part * 2 for part in super().__getitem__(index)]

    def __getitems__(self, indices):  # newer releases of torch refuse a Subset that changes one of the two alone
        return [self[index] for index in indices]


def test_a_subset_that_changes_samples_is_refused(cache: Path) -> None:
    with pytest.raises(UsageError, match="use DataLoader"):
        CachedLoader(Doubled(CachedDataset(cache), [1]), 4)


def test_the_epoch_of_the_dataset_does_not_reach_into_a_loader(cache: Path) -> None:
    turning = CachedDataset(cache, "epoch")
    expected = [images.clone() for images, _ in CachedLoader(CachedDataset(cache, "epoch"), 10)]
    for at, (images, _) in enumerate(CachedLoader(turning, 10)):
        turning.set_epoch(at + 1)
        assert torch.equal(images, expected[at])
