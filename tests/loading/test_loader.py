"""CachedLoader: every sample once, in an order that can be resumed, over buffers that never change under a caller."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import examples
from torch.utils.data import Sampler

from tpucache import CachedDataset, CachedLoader, DamageError, UsageError
from tpucache.loading.ahead import ReadingThreads
from tpucache.store.reader import ShardReader

ids = st.lists(st.integers(0, 149), min_size=1, max_size=60)
few = settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])


def seen(dataset: CachedDataset, batches: list) -> list[bytes]:
    """Tell samples apart by their bytes: all images of the cache differ."""
    return [image.contiguous().numpy().tobytes() for images, _ in batches for image in images]


def read_threads() -> list[str]:
    """Return the threads of loaders; other tests may have datasets at URLs, whose threads end with them."""
    names = tuple(f"tpucache-{part}" for part in ("read", "hint", "prepare"))
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


@pytest.mark.slow
@few
@given(ids, st.integers(1, 40), st.booleans(), st.sampled_from([False, True, "block"]), st.integers(1, 3))
def test_an_epoch_is_covered_exactly(cache, indices, batch, drop_last, shuffle, threads):
    dataset = CachedDataset(cache, indices=sorted(set(indices)))
    loader = CachedLoader(dataset, batch, shuffle=shuffle, drop_last=drop_last, threads=threads, window=20)
    batches = list(loader)
    sizes = [len(images) for images, _ in batches]
    assert len(batches) == len(loader)
    assert all(size == batch for size in sizes[:-1])
    expected = Counter(seen(dataset, [(dataset[i][0][None], None) for i in range(len(dataset))]))
    found = Counter(seen(dataset, batches))
    if drop_last:
        assert sum(sizes) == len(dataset) // batch * batch
        assert found <= expected
    else:
        assert found == expected


@pytest.mark.parametrize("shuffle", [True, "block"])
@pytest.mark.parametrize("batch", [3, 25])
def test_each_rank_has_its_own_samples_read_ahead_and_no_others(cache, monkeypatch, shuffle, batch):
    hinted: list[int] = []
    own: list[int] = []
    everything: list[int] = []
    monkeypatch.setattr(ReadingThreads, "hint", lambda _, work: work())
    monkeypatch.setattr(CachedDataset, "hint", lambda _, indices, *__: hinted.extend(indices.tolist()))
    monkeypatch.setattr(CachedDataset, "read_into", lambda _, __, indices, *___: own.extend(indices.tolist()))
    for rank in range(3):
        place = {"rank": rank, "world_size": 3}
        loader = CachedLoader(CachedDataset(cache), batch, shuffle=shuffle, window=20, threads=1, **place)
        assert sum(1 for _ in loader) == len(loader)
        assert hinted == own
        everything += own
        hinted.clear()
        own.clear()
    assert sorted(everything) == list(range(150))


@pytest.mark.slow
@few
@given(st.integers(1, 8), st.integers(1, 150), st.booleans())
def test_all_ranks_together_see_the_global_batches(cache, world, samples, drop_last):
    dataset = CachedDataset(cache, indices=range(samples))
    whole = list(CachedLoader(dataset, 5 * world, shuffle=True, seed=3, drop_last=drop_last))
    settings = {"shuffle": True, "seed": 3, "drop_last": drop_last, "world_size": world}
    if 0 < samples % (5 * world) < world and not drop_last:
        for rank in range(world):
            with pytest.raises(UsageError, match="some ranks would get an empty batch"):
                CachedLoader(dataset, 5, rank=rank, **settings)
        return
    parts = [list(CachedLoader(dataset, 5, rank=rank, **settings)) for rank in range(world)]
    assert all(len(labels) for part in parts for _, labels in part)
    assert {len(part) for part in parts} == {len(whole)}
    for step, (images, labels) in enumerate(whole):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), labels)


def test_kept_batches_stay_as_they_were(cache):
    dataset = CachedDataset(cache)
    loader = CachedLoader(dataset, 10, shuffle=True, seed=5)
    kept = [(images, labels, images.clone()) for _ in range(4) for images, labels in loader]
    for images, _, copy in kept:
        assert torch.equal(images, copy)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_poisoned_buffer_is_filled_anew(cache, in_memory):
    dataset = CachedDataset(cache, in_memory=in_memory)
    expected = [images.clone() for images, _ in CachedLoader(dataset, 10)]
    for epoch in range(3):
        loader = CachedLoader(dataset, 10)
        for at, (images, _) in enumerate(loader):
            assert torch.equal(images, expected[at]), (epoch, at)
            images.fill_(255)


def test_images_are_channels_last_and_static_in_shape(cache):
    for images, labels in CachedLoader(CachedDataset(cache), 32, drop_last=True):
        assert images.shape == (32, 3, 16, 16)
        assert images.dtype == torch.uint8
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64


@pytest.mark.slow
def test_an_early_break_leaves_no_thread_and_no_open_file(cache):
    gc.collect()
    before = open_files()
    for _ in CachedLoader(CachedDataset(cache), 10):
        break
    with pytest.raises(ZeroDivisionError):
        [1 // 0 for _ in CachedLoader(CachedDataset(cache), 10)]
    gc.collect()
    assert read_threads() == []
    assert open_files() <= before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.usefixtures("no_leases")
@pytest.mark.parametrize("damage", ["cut", "cut later", "gone"])
def test_a_shard_cut_short_or_gone_is_named(copy, damage):
    victim = copy / "v00-00001.lmdb"
    dataset = CachedDataset(copy)
    if damage == "cut later":
        dataset[149]
    if damage != "gone":
        os.truncate(victim, victim.stat().st_size - 4096)
    else:  # before there is a loader: on late storage, as a busy machine's, making one opens the shards for good
        victim.unlink()
    with pytest.raises(DamageError, match=victim.name):
        list(CachedLoader(dataset, 10))
    assert read_threads() == []


@pytest.mark.parametrize(
    ("names", "values"),
    [
        ("batch_size seed threads prefetch window rank world_size", [1.5, "2", None, True, [4], np.array([4])]),
        ("batch_size threads world_size", [0]),
        ("seed prefetch rank", [-1]),
        ("rank", [1]),
        ("drop_last", ["no", 1, None]),
        ("reiterate", ["again", None]),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(cache, names, values):
    for name, value in itertools.product(names.split(), values):
        with pytest.raises(UsageError, match=name):
            CachedLoader(CachedDataset(cache), **{"batch_size": 4, name: value})


def test_a_loader_that_gives_no_batches_says_so(cache, caplog):
    dataset = CachedDataset(cache)
    CachedLoader(dataset, len(dataset), drop_last=True)
    CachedLoader(dataset, len(dataset) + 1)
    assert not caplog.records
    loader = CachedLoader(dataset, len(dataset) + 1, drop_last=True)
    assert [*loader] == []
    assert caplog.messages == [
        f"the loader gives no batches: {len(dataset)} samples do not fill a batch of {len(dataset) + 1}, and drop_last "
        "leaves them out"
    ]


def test_where_no_seed_is_given_it_is_zero(cache):
    dataset = CachedDataset(cache)
    default, zero = CachedLoader(dataset, 40, shuffle=True), CachedLoader(dataset, 40, shuffle=True, seed=0)
    assert default.state_dict() == zero.state_dict()


def test_the_least_of_each_argument_is_enough(cache):
    least = {"threads": 1, "prefetch": 0, "seed": 0, "window": 1, "rank": 0, "world_size": 1}
    loader = CachedLoader(CachedDataset(cache)[:3], 1, shuffle="block", **least)
    assert [len(labels) for _, labels in loader] == [1, 1, 1]


def test_only_a_cached_dataset_is_read():
    with pytest.raises(UsageError, match="CachedDataset"):
        CachedLoader(torch.utils.data.TensorDataset(torch.zeros(4)), 2)


@pytest.fixture
def hinted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The samples that the kernel is asked for, on storage that answers late."""
    asked: list[int] = []
    monkeypatch.setattr(CachedDataset, "hint", lambda _, indices, *__: asked.extend(indices.tolist()))
    monkeypatch.setattr(ReadingThreads, "hint", lambda _, work: work())  # an epoch may end before another thread begins
    monkeypatch.setattr(ShardReader, "is_late", True)
    monkeypatch.setattr("tpucache.loading.loader._SPAN", 10)  # as if the cache had more samples than are hinted at once
    return asked


orders = pytest.mark.parametrize("shuffle", [False, "full", "block"])


@orders
def test_on_late_storage_the_first_records_are_asked_for_while_the_loader_is_made(cache, hinted, monkeypatch, shuffle):
    """And the batches are those of any storage."""
    make = functools.partial(CachedLoader, batch_size=7, shuffle=shuffle, seed=3)
    loader = make(CachedDataset(cache))
    assert set(hinted) == set(range(len(loader.dataset)))
    found = [images.tolist() for images, _ in loader]
    hinted.clear()
    monkeypatch.setattr(ShardReader, "is_late", False)
    loader = make(CachedDataset(cache))
    assert not hinted
    assert [images.tolist() for images, _ in loader] == found


@orders
def test_the_first_iteration_asks_late_storage_only_for_what_was_not_asked_for_before(
    cache, hinted, monkeypatch, shuffle
):
    """It would take time from the threads that read. Later, or with another order, all is asked for again."""
    monkeypatch.setattr("tpucache.loading.loader._LATE_BYTES", 1)
    make = functools.partial(CachedLoader, batch_size=7, shuffle=shuffle, seed=3, window=10)
    loader = make(CachedDataset(cache))
    whole = list(range(len(loader.dataset)))
    assert 0 < len(hinted) < len(whole)
    list(loader)
    assert sorted(hinted) == whole
    list(loader)
    assert sorted(hinted) == sorted(2 * whole)
    hinted.clear()
    loader = make(CachedDataset(cache))
    begun = len(hinted)
    loader.set_epoch(1)
    list(loader)
    assert sorted(hinted[begun:]) == whole


@pytest.mark.usefixtures("hinted")
def test_a_sampler_is_not_asked_for_an_epoch_more_on_late_storage(cache):
    asked: list[int] = []

    class Counted(Sampler):
        def __len__(self):
            return 10

        def __iter__(self):
            asked.append(1)
            return iter(range(10))

    loader = CachedLoader(CachedDataset(cache), 5, sampler=Counted())
    assert not asked
    assert len(list(loader)) == 2
    assert len(asked) == 1
