"""Records kept in memory: the same samples as from the files, each read once."""

from __future__ import annotations

import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset

from tpucache import CachedDataset, CachedLoader, Recipe, UsageError, build_cache
from tpucache.loading.records import reader as reader_module
from tpucache.loading.records.memory import RecordMemory
from tpucache.store.fields import Field
from tpucache.store.reader import ShardReader

RECORD_BYTES = 16 * 16 * 3
few = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
ids = st.lists(st.integers(0, 149), min_size=1, max_size=60)


@few
@given(ids, st.integers(1, 40), st.sampled_from([0, 2, "epoch"]), st.sampled_from([False, True, "block"]))
def test_batches_are_those_of_the_files(cache, indices, batch, variant, shuffle):
    held = CachedLoader(CachedDataset(cache, variant, indices, in_memory=True), batch, shuffle=shuffle)
    read = CachedLoader(CachedDataset(cache, variant, indices), batch, shuffle=shuffle)
    for _ in range(4):  # as many epochs as there are variants, and one more
        for ours, theirs in zip(held, read, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("codec", ["jpeg", "png"])
def test_a_compressed_record_is_decoded_once(photos, tmp_path, codec, monkeypatch):
    build_cache(photos, tmp_path / "cache", Recipe(size=16, codec=codec), jobs=1)
    expected = [images.clone() for images, _ in CachedLoader(CachedDataset(tmp_path / "cache"), 32)]
    calls = []
    decode = reader_module.decode_rows
    monkeypatch.setattr(reader_module, "decode_rows", lambda *parts: (calls.extend(parts[-1]), decode(*parts)))
    loader = CachedLoader(CachedDataset(tmp_path / "cache", in_memory=True), 32)
    for _ in range(3):
        for images, wanted in zip((images for images, _ in loader), expected, strict=True):
            assert torch.equal(images, wanted)
    assert len(calls) == 150


def test_what_was_read_needs_its_file_no_more(cache, tmp_path):
    copy = shutil.copytree(cache, tmp_path / "copy")
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


def fail(*_: object) -> None:
    raise OSError("gone")


def test_a_sample_chosen_many_times_is_kept_once(cache, monkeypatch):
    for variant, indices, records in (
        (0, [4, 9, 4, 4], 2),
        ("epoch", [4, 9, 4, 4], 2 * 3),
        ("epoch", None, 150 * 3),
    ):
        free = records * RECORD_BYTES  # as much as is needed when each is kept once, and not a byte more
        monkeypatch.setattr(reader_module, "available_memory", lambda free=free: free)
        CachedDataset(cache, variant, indices, in_memory=True)
        monkeypatch.setattr(reader_module, "available_memory", lambda free=free: free - 1)
        with pytest.raises(UsageError, match=f"{records} records in memory"):
            CachedDataset(cache, variant, indices, in_memory=True)


def test_a_pickled_copy_begins_empty_and_reads_the_same(cache):
    dataset = CachedDataset(cache, in_memory=True)
    images = dataset[5][0]
    assert len(pickle.dumps(dataset)) < len(pickle.dumps(CachedDataset(cache))) + 1000
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.in_memory
    assert torch.equal(copy[5][0], images)


def test_auto_takes_a_third_of_what_is_free(cache, monkeypatch):
    needs = 150 * 16 * 16 * 3
    for free, kept in ((3 * needs, True), (3 * needs - 1, False)):
        monkeypatch.setattr(reader_module, "available_memory", lambda free=free: free)
        assert CachedDataset(cache, in_memory="auto").in_memory is kept


def test_more_than_is_free_is_refused(cache, monkeypatch):
    monkeypatch.setattr(reader_module, "available_memory", lambda: 1000)
    with pytest.raises(UsageError, match=r"150 records in memory take 0\.0 GB"):
        CachedDataset(cache, in_memory=True)
    assert not CachedDataset(cache, in_memory=False).in_memory


def test_a_part_keeps_its_own_samples_in_memory(cache):
    part = CachedDataset(cache, in_memory=True).select([7, 3])
    assert part.in_memory
    assert torch.equal(part[1][0], CachedDataset(cache)[3][0])


def test_nothing_is_hinted_that_is_in_memory(cache, monkeypatch):
    hinted = []
    monkeypatch.setattr(ShardReader, "hint", lambda _, rows: hinted.append(len(rows)))
    dataset = CachedDataset(cache, in_memory=True)
    dataset.hint(np.arange(10), 0)
    for index in range(5):
        dataset[index]
    dataset.hint(np.arange(10), 0)
    assert hinted == [10, 5]


def test_batches_are_copies_that_a_caller_may_overwrite(cache: Path):
    dataset = CachedDataset(cache, in_memory=True)
    expected = [images.clone() for images, _ in CachedLoader(dataset, 10)]
    for _ in range(3):
        for (images, _), wanted in zip(CachedLoader(dataset, 10), expected, strict=True):
            assert torch.equal(images, wanted)
            images.fill_(255)


def count_read(monkeypatch) -> list[int]:
    """Count the records that are read from their files."""
    read: list[int] = []
    scatter = ShardReader.scatter
    monkeypatch.setattr(
        ShardReader, "scatter", lambda self, rows, views: (read.append(len(rows)), scatter(self, rows, views))
    )
    return read


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


def test_records_that_are_shared_need_no_more_memory(cache, monkeypatch):
    monkeypatch.setattr(reader_module, "available_memory", lambda: 150 * RECORD_BYTES)
    dataset = CachedDataset(cache, indices=range(100), in_memory=True)
    assert dataset.select(range(50, 100)).in_memory
    assert all(dataset.select(range(start, start + 60)).in_memory for start in range(0, 40, 10))


def test_records_that_another_part_will_still_read_are_not_free(cache, monkeypatch):
    dataset = CachedDataset(cache, in_memory="auto")
    free = 90 * RECORD_BYTES
    monkeypatch.setattr(reader_module, "available_memory", lambda: free)
    whole = CachedDataset(cache, in_memory="auto")
    assert not whole.in_memory
    kept = [whole.select(range(start, start + 30)).in_memory for start in (0, 30, 60)]
    assert kept == [True, False, False]  # a third of 90, then a third of the 60 that are left is 20
    assert dataset.in_memory


@few
@given(st.lists(st.lists(st.integers(0, 99), unique=True, max_size=40), max_size=8), st.integers(0, 100))
def test_every_claimed_record_has_a_slot_of_its_own_for_good(claims, room):
    memory = RecordMemory([Field("image", "raw", "|u1", (1, 1, 1))], 100, 100)
    slots: dict[int, int] = {}
    for claim in claims:
        numbers = np.array(claim, np.int64)
        new = len(set(claim) - set(slots))
        assert memory.bytes_of([numbers]) == new
        if memory.claim([numbers], max(room, new if not slots else 0)):
            for number, slot in zip(claim, memory.slots(numbers).tolist(), strict=True):
                assert slots.setdefault(number, slot) == slot
        else:
            assert memory.bytes_of([numbers]) == new
    assert sorted(slots.values()) == list(range(len(slots)))
    assert memory.unfilled_bytes == len(slots)


def test_threads_that_claim_at_once_get_slots_of_their_own():
    memory = RecordMemory([Field("image", "raw", "|u1", (1, 1, 1))], 1000, 1000)
    assert memory.claim([np.arange(1)], 1000)
    parts = [np.arange(start, start + 50) for start in range(0, 950, 25)]
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda part: memory.claim([part], 1000), parts))
    assert sorted(memory.slots(np.arange(975)).tolist()) == list(range(975))


def test_where_less_may_be_allocated_auto_reads_from_files(cache, monkeypatch):
    monkeypatch.setattr(RecordMemory, "_make_room", lambda *_: False)
    assert not CachedDataset(cache, in_memory="auto").in_memory
    with pytest.raises(UsageError, match="150 records in memory"):
        CachedDataset(cache, in_memory=True)
