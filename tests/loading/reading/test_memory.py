"""Records kept in memory: the same samples as from the files, each read once."""

from __future__ import annotations

import ctypes
import logging
import pickle
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import examples
from torch.utils.data import Subset

from tpucache import CachedDataset, CachedLoader, Recipe, UsageError, build_cache
from tpucache.loading.reading import memory as memory_module
from tpucache.loading.reading import record_reader as reader_module
from tpucache.loading.reading.memory import MemoryBudget, RecordMemory
from tpucache.store.reader import ShardReader

RECORD_BYTES = 16 * 16 * 3
few = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
ids = st.lists(st.integers(0, 149), min_size=1, max_size=60)


@pytest.fixture
def free(monkeypatch, no_leases) -> Callable[..., None]:
    """A separate budget, for a machine with this many bytes free, which are granted so many at a time."""

    def set_free(size: int, step: int = 1 << 26) -> None:
        budget = MemoryBudget(lambda: size - budget.used, step)
        for module in (memory_module, reader_module):
            monkeypatch.setattr(module, "BUDGET", budget)

    return set_free


@pytest.mark.slow
@few
@given(ids, st.integers(1, 40), st.sampled_from([0, 2, "epoch"]), st.sampled_from([False, True, "block"]))
def test_batches_are_those_of_the_files(cache, indices, batch, variant, shuffle):
    held = CachedLoader(CachedDataset(cache, variant, indices, in_memory=True), batch, shuffle=shuffle)
    read = CachedLoader(CachedDataset(cache, variant, indices), batch, shuffle=shuffle)
    for _ in range(4):  # as many epochs as there are variants, and one more
        for ours, theirs in zip(held, read, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["jpeg", "png"])
def test_a_compressed_record_is_decoded_once(photos, tmp_path, codec):
    build_cache(photos, tmp_path / "cache", Recipe(size=16, codec=codec), jobs=1)
    expected = [images.clone() for images, _ in CachedLoader(CachedDataset(tmp_path / "cache"), 32)]
    loader = CachedLoader(CachedDataset(tmp_path / "cache", in_memory=True), 32)
    for _ in range(3):
        for images, wanted in zip((images for images, _ in loader), expected, strict=True):
            assert torch.equal(images, wanted)
    assert loader.metrics()["records"] == {"memory": 300, "map": 0, "file": 150}


def test_what_was_read_needs_its_file_no_more(copy):
    dataset = CachedDataset(copy, in_memory=True)
    before = [images.clone() for images, _ in CachedLoader(dataset, 50)]
    for shard in copy.glob("*.lmdb"):
        shard.write_bytes(b"")
    assert all(torch.equal(a, b) for a, (b, _) in zip(before, CachedLoader(dataset, 50), strict=True))
    assert torch.equal(dataset[7][0], before[0][7])


def test_what_failed_to_be_read_is_not_taken_for_read(cache, monkeypatch):
    dataset = CachedDataset(cache, in_memory=True)
    with monkeypatch.context() as broken:
        broken.setattr(ShardReader, "scatter", fail)
        with pytest.raises(OSError, match="gone"):
            dataset[3]
    assert torch.equal(dataset[3][0], CachedDataset(cache)[3][0])


def fail(*_: object, **__: object) -> None:
    raise OSError("gone")


def test_a_pickled_copy_begins_empty_and_reads_the_same(cache):
    dataset = CachedDataset(cache, in_memory=True)
    images = dataset[5][0]
    assert len(pickle.dumps(dataset)) < len(pickle.dumps(CachedDataset(cache))) + 1000
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.in_memory
    assert torch.equal(copy[5][0], images)


def test_more_than_is_free_is_refused(cache, free):
    free(1000)
    with pytest.raises(UsageError, match=r"150 records in memory take 0\.0 GB"):
        CachedDataset(cache, in_memory=True)
    assert not CachedDataset(cache, in_memory=False).in_memory


def test_nothing_is_hinted_that_is_in_memory(cache, monkeypatch):
    hinted = []
    monkeypatch.setattr(ShardReader, "hint", lambda _, rows: hinted.append(len(rows)))
    dataset = CachedDataset(cache, in_memory=True)
    dataset.hint(np.arange(10), 0)
    for index in range(5):
        dataset[index]
    dataset.hint(np.arange(10), 0)
    assert hinted == [10, 5]


def count_read(monkeypatch) -> list[int]:
    """Count the records that are read from their files."""
    read: list[int] = []
    scatter = ShardReader.scatter
    monkeypatch.setattr(
        ShardReader,
        "scatter",
        lambda self, rows, views, **how: (read.append(len(rows)), scatter(self, rows, views, **how)),
    )
    return read


@pytest.mark.slow
@pytest.mark.parametrize("variant", [0, "epoch"])
def test_what_is_selected_from_a_dataset_shares_its_records(cache, variant, monkeypatch):
    dataset = CachedDataset(cache, variant, in_memory=True)
    plain = CachedDataset(cache, variant)
    expected = [plain[i][0] for i in range(150)]
    read = count_read(monkeypatch)
    folds = [np.flatnonzero(np.arange(150) % 5 != fold) for fold in range(5)]
    parts = [dataset.select(fold) for fold in folds] + [dataset.select(folds[0]).select([3, 1])]
    for part, fold in zip(parts[:5], folds, strict=True):
        for images, wanted in zip(CachedLoader(part, 1), fold, strict=True):
            assert torch.equal(images[0][0], expected[wanted])
    list(CachedLoader(Subset(dataset, folds[2].tolist()), 40))
    list(CachedLoader(dataset, 40))
    assert torch.equal(parts[5][0][0], expected[folds[0][3]])
    assert sum(read) == 150


def test_records_that_are_shared_need_no_more_memory(cache, free):
    free(150 * RECORD_BYTES)
    dataset = CachedDataset(cache, indices=range(100), in_memory=True)
    assert dataset.select(range(50, 100)).in_memory
    assert all(dataset.select(range(start, start + 60)).in_memory for start in range(0, 40, 10))


@pytest.mark.slow
@few
@given(st.lists(st.lists(st.integers(0, 99), max_size=40), max_size=8), st.integers(1, 100), st.integers(0, 150))
def test_what_is_kept_is_what_was_given_however_often_and_however_little_room_there_is(calls, most, room):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "BUDGET", MemoryBudget(lambda: 2 * 10 * room, 30))
        memory = RecordMemory(10, 100, most)
        for numbers in calls:
            keep(memory, np.array(numbers, np.int64))
            kept = [number for number in range(100) if memory.addresses(np.array([number]))[0]]
            assert len(kept) <= min(most, room + 3)
            assert memory.granted >= 10 * len(kept)
            assert all(value_of(memory, number) == bytes([number] * 10) for number in kept)


def keep(memory: RecordMemory, numbers: np.ndarray) -> None:
    """Keep records whose bytes are all their number."""

    def write(which, addresses):
        for number, address in zip(numbers[which].tolist(), addresses.tolist(), strict=True):
            ctypes.memset(address, number, 10)

    memory.keep(numbers, write)


def value_of(memory: RecordMemory, number: int) -> bytes:
    return ctypes.string_at(int(memory.addresses(np.array([number]))[0]), 10)


def test_threads_that_keep_the_same_records_at_once_keep_each_once():
    memory = RecordMemory(10, 100, 100)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda start: keep(memory, np.arange(start, start + 50)), list(range(50)) * 4))
    assert np.ptp(memory.addresses(np.arange(99))) == 98 * 10
    assert all(value_of(memory, number) == bytes([number] * 10) for number in range(99))


def test_a_system_that_gives_no_memory_is_an_error_only_where_it_was_asked_for(cache, monkeypatch):
    monkeypatch.setattr(RecordMemory, "_reserve", lambda *_: False)
    with pytest.raises(UsageError, match="150 records in memory"):
        CachedDataset(cache, in_memory=True)
    assert len(list(CachedLoader(CachedDataset(cache), 50))) == 3


@pytest.mark.usefixtures("no_leases")
def test_a_loader_keeps_what_it_reads_and_single_samples_are_not_kept(cache, monkeypatch):
    dataset = CachedDataset(cache)
    read = count_read(monkeypatch)
    for _ in range(3):
        dataset[3]
    assert sum(read) == 3
    for _ in range(3):
        list(CachedLoader(dataset, 40, shuffle=True))
    dataset[5]
    assert sum(read) == 3 + 150
    assert dataset.reading == ("keep", 150 * RECORD_BYTES)


def test_what_does_not_fit_into_half_of_what_is_free_is_read_each_time(cache, free, monkeypatch, caplog):
    free(2 * 90 * RECORD_BYTES, 30 * RECORD_BYTES)
    dataset, whole = CachedDataset(cache), CachedDataset(cache, in_memory=False)
    assert dataset.reading == ("stream", 90 * RECORD_BYTES)
    assert not dataset.in_memory
    read = count_read(monkeypatch)
    with caplog.at_level(logging.INFO, "tpucache"):
        for _ in range(3):
            for ours, theirs in zip(CachedLoader(dataset, 30), CachedLoader(whole, 30), strict=True):
                assert torch.equal(ours[0], theirs[0])
    assert sum(read) == 3 * 150 + 150 + 60 + 60
    assert len([record for record in caplog.records if "read each time" in record.message]) == 1


def test_the_budget_is_one_for_all_datasets_and_comes_back_with_them(cache, free):
    free(2 * 200 * RECORD_BYTES)
    first = CachedDataset(cache)
    list(CachedLoader(first, 50))
    assert first.reading == ("keep", 150 * RECORD_BYTES)
    second = CachedDataset(cache, 1)
    assert second.reading == ("stream", 50 * RECORD_BYTES)
    first.close()
    assert second.reading.way == "keep"


def test_memory_that_others_take_meanwhile_is_not_taken(cache, free):
    free(2 * 150 * RECORD_BYTES, 30 * RECORD_BYTES)
    loader = CachedLoader(CachedDataset(cache), 30, prefetch=0)
    batches = iter(loader)
    next(batches)
    free(20 * RECORD_BYTES, 30 * RECORD_BYTES)
    assert len(list(batches)) == 4
    deque(loader, 0)
    assert 0 < loader.metrics()["records"]["memory"] <= 60


WORKERS = """
import processes, sys, torch, warnings
from torch.utils.data import DataLoader
from tpucache import CachedDataset
from tpucache.loading.reading.memory import BUDGET

processes.fork_alone()
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This DataLoader will create 2 worker")  # torch, where there is one core
BUDGET.available = lambda: int(sys.argv[3]) - BUDGET.used
dataset = CachedDataset(sys.argv[1], in_memory={"auto": "auto", "True": True}[sys.argv[2]])
expected = [images.clone() for images, _ in DataLoader(dataset, 50)]
loader = DataLoader(dataset, 50, num_workers=2, multiprocessing_context="fork")
assert all(torch.equal(images, wanted) for (images, _), wanted in zip(loader, expected, strict=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", ["auto", True])
def test_workers_of_a_dataloader_give_the_same_and_keep_nothing_beyond_the_budget(cache, in_memory, run_with_torch):
    done = run_with_torch(WORKERS, cache, in_memory, 4 * 150 * RECORD_BYTES)
    assert done.returncode == 0, done.stderr
