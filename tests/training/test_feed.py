"""Batches come in order and ahead of the loop, as often as they are continued; errors are raised in the loop."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import PATIENCE

from tpucache import CachedDataset, CachedLoader, MixedLoader, UsageError
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training.device import CpuDevice
from tpucache.training.feed import Feeder, drawer, parts
from tpucache.training.settings import TrainSettings


def batches(count, closed=None):
    try:
        for number in range(count):
            yield torch.full((2, 3, 4, 4), number, dtype=torch.uint8), torch.tensor([number, number])
    finally:
        if closed is not None:
            closed.append(True)


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name == "tpucache-feed"]


def test_batches_arrive_in_order_with_channels_last():
    with Feeder(batches(7), CpuDevice()) as feeder:
        found = list(feeder)
    assert [int(batch.labels[0]) for batch in found] == list(range(7))
    assert all(batch.images.shape == (2, 4, 4, 3) for batch in found)
    assert [int(batch.images.max()) for batch in found] == list(range(7))


def test_dicts_and_random_numbers_go_up_by_name_and_number():
    def tokens():
        for number in range(3):
            yield {"ids": torch.full((2, 5), number), "label": torch.tensor([number, 1])}

    def draw(number):
        return np.full((2, 4), number, np.float32)

    with Feeder(tokens(), CpuDevice(), draw=draw, first=7) as feeder:
        found = list(feeder)
    assert [int(batch.fields["ids"][0, 0]) for batch in found] == [0, 1, 2]
    assert [int(batch.draws[0, 0]) for batch in found] == [7, 8, 9]
    assert [batch.labels.tolist() for batch in found] == [[0, 1], [1, 1], [2, 1]]


def test_an_error_in_the_data_is_raised_after_the_batches_before_it():
    def failing():
        yield from batches(3)
        raise OSError("disk gone")

    with Feeder(failing(), CpuDevice()) as feeder:
        iterator = iter(feeder)
        assert [int(next(iterator).labels[0]) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="disk gone"):
            next(iterator)


def test_an_error_in_the_upload_is_raised_in_the_loop():
    class Broken(CpuDevice):
        def put(self, batch):
            raise RuntimeError("no room on the device")

    with Feeder(batches(3), Broken()) as feeder, pytest.raises(RuntimeError, match="no room"):
        next(iter(feeder))


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_leaving_early_leaves_no_thread_and_closes_the_data(taken):
    closed = []
    with Feeder(batches(1000, closed), CpuDevice()) as feeder:
        for _, _ in zip(range(taken), feeder, strict=False):
            pass
    assert feed_threads() == []
    assert closed == [True]


def loader_of(cache, **options):
    return CachedLoader(CachedDataset(cache)[:60], 10, shuffle=True, **options)


def halves(cache):
    dataset = CachedDataset(cache)
    loaders = [CachedLoader(part, 10, shuffle=True) for part in (dataset[:30], dataset[30:60])]
    return MixedLoader(loaders, shares=[1, 1])


@pytest.mark.parametrize("make", [loader_of, halves])
@pytest.mark.parametrize("taken", [0, 1, 4, 6])
def test_a_state_counts_the_batches_handed_out_and_not_those_read_ahead(cache, make, taken):
    class Counting(CpuDevice):
        sent = 0

        def put(self, batch):
            self.sent += 1
            return super().put(batch)

    loader, device = make(cache), Counting()
    loader.set_epoch(3)
    with Feeder(loader, device) as feeder:
        for number, _ in zip(range(taken), feeder, strict=False):
            while device.sent <= number + 1 and feed_threads():
                time.sleep(0.001)  # until a batch is read ahead
        state = feeder.state_dict()
        assert state == loader.state_dict()
    assert state == loader.state_dict()
    assert (state["epoch"], state["position"]) == divmod(3 * 60 + 10 * taken, 60)
    plain = make(cache)
    plain.set_epoch(3)
    for _ in zip(range(taken), plain, strict=False):
        pass
    resumed, again = make(cache), Feeder(make(cache), CpuDevice())
    resumed.load_state_dict(state)
    again.load_state_dict(state)
    with again:
        assert [batch.labels.tolist() for batch in again] == [labels.tolist() for _, labels in resumed]
    assert plain.state_dict() == state


def test_the_states_of_all_ranks_are_the_same_and_continue_on_one(cache):
    found = []
    for rank in range(2):
        with Feeder(loader_of(cache, rank=rank, world_size=2), CpuDevice(), depth=1) as feeder:
            next(iter(feeder))
            found.append(feeder.state_dict())
    assert found[0] == found[1]
    alone = loader_of(cache)
    alone.load_state_dict(found[0])
    assert sum(len(labels) for _, labels in alone) == 40


def test_what_has_no_state_says_so(cache):
    feeder = Feeder(batches(3), CpuDevice())
    for call in (feeder.state_dict, lambda: feeder.load_state_dict({})):
        with pytest.raises(UsageError, match="reads a generator: give the Feeder the loader itself"):
            call()
    with Feeder(loader_of(cache), CpuDevice()) as feeder, pytest.raises(UsageError, match="before its `with` block"):
        feeder.load_state_dict(feeder.state_dict())


def test_a_closed_loader_is_refused_and_not_waited_for(cache):
    loader = loader_of(cache)
    loader.close()
    with pytest.raises(UsageError, match="closed"), Feeder(loader, CpuDevice()) as feeder:
        next(iter(feeder))


def test_waiting_for_slow_data_is_counted_and_for_fast_data_is_not(monkeypatch):
    now, asked, is_asking = [0.0], threading.Semaphore(0), itertools.cycle([True, False])

    def clock():
        if next(is_asking):  # the loop reads it before and after it waits
            asked.release()
        return now[0]

    monkeypatch.setattr(time, "perf_counter", clock)

    def slow():
        for batch in batches(4):
            asked.acquire(timeout=PATIENCE)  # the loop waits
            now[0] += 0.05
            yield batch

    with Feeder(slow(), CpuDevice()) as feeder:
        list(feeder)
    assert feeder.waited_seconds == pytest.approx(0.2)
    with Feeder(batches(4), CpuDevice()) as feeder:
        for _ in feeder:
            now[0] += 0.02  # the loop computes
    assert feeder.waited_seconds == 0


SETTINGS = TrainSettings(batch_size=16, balance=True, epochs=2)


def rare(cache: Path) -> CachedDataset:
    """A dataset of 38 samples of one class and 10 of each other."""
    dataset = CachedDataset(cache)
    labels = dataset.labels.numpy()
    return dataset.select(
        np.concatenate([np.flatnonzero(labels == label)[: 10 if label else 38] for label in range(4)])
    )


def test_a_balanced_run_shows_each_class_equally_often(cache: Path) -> None:
    dataset = rare(cache)
    labels = torch.cat([labels for _, labels in parts(SETTINGS, dataset, epochs=2)])
    counts = torch.bincount(labels)
    assert torch.bincount(dataset.labels).tolist() == [38, 10, 10, 10]
    assert int(counts.max() - counts.min()) <= 2 * (1 + 4)  # 4 samples of each epoch are in no whole batch


def test_a_balanced_run_continues_at_any_step(cache: Path) -> None:
    dataset = rare(cache)
    whole = [images.clone() for images, _ in parts(SETTINGS, dataset, epochs=2)]
    rest = [images.clone() for images, _ in parts(SETTINGS, dataset, first_step=5, epochs=2)]
    assert 5 + len(rest) == len(whole)
    assert all(torch.equal(one, other) for one, other in itertools.zip_longest(rest, whole[5:]))


def test_a_batch_in_parts_shows_the_pictures_of_the_whole_one(cache: Path) -> None:
    dataset = CachedDataset(cache)
    augment = AugmentSettings(flip=True, crop=True, shift=2, hue=0.1)
    whole = TrainSettings(epochs=2, batch_size=48, augment=augment)
    split = dataclasses.replace(whole, accumulate=3)
    at_once, by_part = drawer(whole, dataset), drawer(split, dataset)
    assert at_once is not None
    assert by_part is not None
    shown = [
        torch.cat([images for images, _ in itertools.islice(parts(settings, dataset, epochs=2), count)])
        for settings, count in ((whole, 4), (split, 12))
    ]
    assert torch.equal(*shown)
    for step in range(4):
        drawn = np.concatenate([by_part(3 * step + part) for part in range(3)])
        np.testing.assert_array_equal(drawn, at_once(step))
