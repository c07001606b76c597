"""Loaders and datasets that another process gets, and the epoch that nobody sets there."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from thorough import thorough
from torch.utils.data import DataLoader

from tpucache import CachedDataset, CachedLoader, UsageError
from tpucache.loading.ahead import Ahead

SAMPLES, BATCH = 24, 4


def whole(cache: Path) -> CachedLoader:
    return CachedLoader(CachedDataset(cache)[:SAMPLES], BATCH, shuffle=True)


def test_a_pickled_loader_is_small_however_much_was_read(cache: Path) -> None:
    loader = whole(cache)
    list(loader)
    assert len(pickle.dumps(loader)) < len(pickle.dumps(loader.dataset)) + 4000


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
