"""What an iteration shows after one that was left before its end, and loaders that another process gets."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import thorough
from torch.utils.data import DataLoader, RandomSampler

from tpucache import CachedDataset, CachedLoader, MixedLoader, UsageError
from tpucache.loading.ahead import Ahead

SAMPLES, BATCH = 24, 4
Make = Callable[..., Any]


def whole(cache: Path, **options: Any) -> CachedLoader:
    return CachedLoader(CachedDataset(cache)[:SAMPLES], BATCH, seed=3, **{"shuffle": True, **options})


def turning(cache: Path, **options: Any) -> CachedLoader:
    return CachedLoader(CachedDataset(cache, "epoch")[:SAMPLES], BATCH, seed=3, shuffle="block", window=8, **options)


def weighted(cache: Path, **options: Any) -> CachedLoader:
    return CachedLoader(CachedDataset(cache)[:SAMPLES], BATCH, weights=np.arange(1.0, SAMPLES + 1), **options)


def balanced(cache: Path, **options: Any) -> CachedLoader:
    return CachedLoader(CachedDataset(cache)[:SAMPLES], BATCH, balance=True, **options)


def sampled(cache: Path, **options: Any) -> CachedLoader:
    dataset = CachedDataset(cache)[:SAMPLES]
    return CachedLoader(dataset, BATCH, sampler=RandomSampler(dataset), **options)


def mixed(cache: Path, **options: Any) -> MixedLoader:
    dataset = CachedDataset(cache)
    loaders = [CachedLoader(part, BATCH, shuffle=True, **options) for part in (dataset[:16], dataset[16:SAMPLES])]
    return MixedLoader(loaders, shares=[2, 1])


ALL: list[Make] = [whole, turning, weighted, balanced, sampled, mixed]


def shown(batches: Any) -> list[bytes]:
    return [image.contiguous().numpy().tobytes() for images, _ in batches for image in images]


def of_epoch(loader: Any, epoch: int) -> list[bytes]:
    loader.set_epoch(epoch)
    return shown(loader)


@pytest.mark.parametrize("make", ALL)
def test_an_iteration_that_is_left_early_is_followed_by_the_next_epoch(cache: Path, make: Make) -> None:
    loader, other = make(cache), make(cache)
    for epoch in range(4):
        some = shown(itertools.islice(loader, 1 + epoch % 3))
        assert some == of_epoch(other, epoch)[: len(some)]
    assert shown(loader) == of_epoch(other, 4)
    assert shown(loader) == of_epoch(other, 5)


@pytest.mark.parametrize("make", ALL)
def test_same_begins_an_iteration_again_that_was_left_early(cache: Path, make: Make) -> None:
    loader, other = make(cache, reiterate="same"), make(cache)
    for steps in (2, 1, 3):
        some = shown(itertools.islice(loader, steps))
        assert some == of_epoch(other, 0)[: len(some)]
    assert [shown(loader), shown(loader)] == [of_epoch(other, 0), of_epoch(other, 1)]
    with pytest.raises(UsageError, match="reiterate"):
        make(cache, reiterate="again")


def test_loaders_of_a_mixture_agree_on_what_follows(cache: Path) -> None:
    one, other = whole(cache), whole(cache, reiterate="same")
    with pytest.raises(UsageError, match="loader 1 has reiterate same, loader 0 next"):
        MixedLoader([one, other], shares=[1, 1])


@pytest.mark.slow
@settings(max_examples=20)  # each reads several epochs
@given(st.lists(st.integers(0, 6), max_size=6), st.integers(0, 6))
def test_the_order_depends_on_how_many_iterations_gave_batches_and_on_nothing_else(
    cache: Path, steps: list[int], last: int
) -> None:
    loader, other = whole(cache), whole(cache)
    for count in steps:
        shown(itertools.islice(loader, count))
    epoch = sum(count > 0 for count in steps)
    assert shown(itertools.islice(loader, last)) == of_epoch(other, epoch)[: last * BATCH]


@pytest.mark.slow
@settings(max_examples=20)  # each reads several epochs
@given(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3), st.integers(1, 5))
def test_a_state_continues_where_an_iteration_was_left_and_its_next_one_moves_on(
    cache: Path, epochs: int, steps: int, unused: int, taken: int
) -> None:
    loader, other = whole(cache), whole(cache)
    for _ in range(epochs):
        next(iter(loader))
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    resumed = whole(cache)
    resumed.load_state_dict(loader.state_dict())
    for _ in range(unused):
        iter(resumed)  # nothing was taken: nothing is lost
    expected = of_epoch(other, epochs)[steps * BATCH :]
    some = shown(itertools.islice(resumed, taken))
    assert some == expected[: taken * BATCH]
    assert shown(resumed) == of_epoch(other, epochs + 1)


@pytest.mark.parametrize("read_ahead", [1, 5])
def test_what_reads_ahead_moves_on_by_what_it_handed_out(cache: Path, read_ahead: int) -> None:
    loader, other = whole(cache), whole(cache)
    for epoch, taken in enumerate([2, 6, 1]):
        with Ahead(loader, lambda batch, _: batch, read_ahead) as ahead:
            assert shown(itertools.islice(ahead, taken)) == of_epoch(other, epoch)[: taken * BATCH]
    with Ahead(loader, lambda batch, _: batch, read_ahead):
        pass  # whatever was read, nothing was taken
    assert shown(loader) == of_epoch(other, 3)


def test_iterations_that_begin_together_show_one_epoch_and_one_that_begins_later_the_next(cache: Path) -> None:
    loader, other = whole(cache), whole(cache)
    first, second = [], []
    for one, two in zip(loader, loader, strict=True):
        first.append(one), second.append(two)
    assert shown(first) == shown(second) == of_epoch(other, 0)
    early = iter(loader)
    begun = shown([next(early)])
    late = iter(loader)
    assert shown([next(late)]) == of_epoch(other, 2)[:BATCH]
    assert begun + shown(early) == of_epoch(other, 1)  # it takes nothing back
    assert shown(loader) == of_epoch(other, 3)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("copied", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy])
def test_a_pickled_loader_is_at_the_same_place(cache: Path, make: Make, copied: Callable[[Any], Any]) -> None:
    loader = make(cache)
    shown(itertools.islice(loader, 2))
    left = copied(loader)
    assert left.state_dict() == loader.state_dict()
    assert left.metrics()["batches"] == 0
    assert shown(left) == shown(loader)
    loader.load_state_dict({**make(cache).state_dict(), "position": 8})
    assert shown(copied(loader)) == shown(loader)


def test_a_pickled_loader_is_small_however_much_was_read(cache: Path) -> None:
    loader = whole(cache)
    list(loader)
    assert len(pickle.dumps(loader)) < len(pickle.dumps(loader.dataset)) + 4000


def test_a_closed_loader_stays_closed_where_it_is_unpickled(cache: Path) -> None:
    loader = whole(cache)
    loader.close()
    with pytest.raises(UsageError, match="closed"):
        iter(pickle.loads(pickle.dumps(loader)))


SPAWNED = """
import sys, torch
from tpucache import CachedDataset, CachedLoader, MixedLoader

def read(rank, loaders, place):
    torch.save([[labels for _, labels in loader] for loader in loaders], f"{place}/{rank}")

if __name__ == "__main__":
    cache, place = sys.argv[1:]
    loader = CachedLoader(CachedDataset(cache, "epoch"), 32, shuffle=True)
    next(iter(loader))
    loaders = loader, MixedLoader([loader, CachedLoader(CachedDataset(cache), 32)], shares=[1, 2])
    torch.multiprocessing.spawn(read, args=(loaders, place), nprocs=1)
    read(1, loaders, place)
    one, other = (torch.load(f"{place}/{rank}") for rank in (0, 1))
    assert all(torch.equal(a, b) for first, second in zip(one, other) for a, b in zip(first, second, strict=True))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_spawned_process_reads_what_its_parent_would_read(cache: Path, tmp_path: Path, run_with_torch: Any) -> None:
    done = run_with_torch(SPAWNED, cache, tmp_path)
    assert done.returncode == 0, done.stderr


def test_what_has_a_thread_says_what_to_give_another_process(cache: Path) -> None:
    with Ahead(whole(cache), lambda batch, _: batch) as ahead:
        for each in (ahead, Ahead(whole(cache), lambda batch, _: batch)):
            with pytest.raises(
                UsageError, match="give the loader to that process, and make a Ahead from the loader there"
            ):
                pickle.dumps(each)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "set_epoch" in record.getMessage()]


def test_a_data_loader_is_warned_once_where_nobody_sets_the_epoch(cache: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "tpucache"):
        loader = DataLoader(CachedDataset(cache, "epoch", indices=range(SAMPLES)), BATCH, shuffle=True)
        list(loader)
        assert not warnings_of(caplog)
        for _ in range(3):
            list(loader)
    (warning,) = warnings_of(caplog)
    assert all(part in warning for part in (str(cache), "dataset.set_epoch(epoch)", "CachedLoader"))


@pytest.mark.parametrize("variant", ["epoch", 0, 1])
def test_nobody_is_warned_who_sets_the_epoch_or_asked_for_one_variant(cache: Path, caplog: Any, variant: Any) -> None:
    with caplog.at_level(logging.WARNING, "tpucache"):
        dataset = CachedDataset(cache, variant, indices=range(SAMPLES))
        for epoch in range(3):
            if variant == "epoch":
                dataset.set_epoch(epoch)
            list(DataLoader(dataset, BATCH))
            list(CachedLoader(CachedDataset(cache, "epoch", indices=range(SAMPLES)), BATCH))
    assert not warnings_of(caplog)


WORKERS = """
import processes, sys
from torch.utils.data import DataLoader
from tpucache import CachedDataset

if __name__ == "__main__":
    processes.fork_alone()
    method, keeps, cache = sys.argv[1:]
    dataset = CachedDataset(cache, "epoch", indices=range(20))
    loader = DataLoader(
        dataset, 10, num_workers=1, persistent_workers=keeps == "yes", multiprocessing_context=method
    )
    for _ in range(3):  # the second epoch is warned of, the third is not
        assert sum(len(labels) for _, labels in loader) == 20
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "keeps"), [("fork", "yes"), ("fork", "no"), *thorough(("spawn", "no"))])
def test_workers_warn_once_also_where_each_epoch_has_new_ones(
    cache: Path, run_with_torch: Any, method: str, keeps: str
) -> None:
    done = run_with_torch(WORKERS, method, keeps, cache)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("dataset.set_epoch(epoch)") == 1
