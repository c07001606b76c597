"""Loaders, their states and ranks."""

from __future__ import annotations

import itertools

import numpy as np
from lab import COUNT, array, number_of, pixels
from refusals import refuses, succeeded

from tpucache import CachedDataset, CachedLoader, UsageError


def numbers(loader: CachedLoader, batches: int | None = None) -> list[int]:
    """Return the numbers of the photographs that a loader gives, recognised by their pixels alone."""
    known = {pixels(n).tobytes(): n for n in range(COUNT)} | {(255 - pixels(n)).tobytes(): n for n in range(COUNT)}
    found = []
    for count, (images, _) in enumerate(loader, 1):
        found += [known[array(image).tobytes()] for image in images]
        if count == batches:
            break
    return found


def test_sizes_threads_and_seeds_that_make_no_sense(lab):
    dataset = CachedDataset(lab.shared.cache)
    bad = [("batch_size", value) for value in (0, -1, 2.5, True, "8", None)]
    bad += [("threads", 0), ("prefetch", -1), ("window", 0), ("seed", -1), ("seed", 1.5), ("world_size", 0)]
    bad += [("rank", 1), ("rank", -1), ("shuffle", "Full"), ("shuffle", 1), ("shuffle", None), ("drop_last", "no")]
    for name, value in bad:
        with refuses(UsageError, name):
            CachedLoader(dataset, **{"batch_size": 4, name: value})


def test_more_ranks_than_samples(lab):
    dataset = CachedDataset(lab.shared.cache).select(range(3))
    with refuses(UsageError, "4 ranks", "drop_last"):
        CachedLoader(dataset, 1, world_size=4)


def test_ranks_of_uneven_shares(lab):
    dataset = CachedDataset(lab.shared.cache)
    for shuffle in (False, "full", "block"):
        ranks = [CachedLoader(dataset, 3, shuffle=shuffle, rank=rank, world_size=3, window=8) for rank in range(3)]
        batches = [numbers(CachedLoader(dataset, 3, shuffle=shuffle, rank=r, world_size=3, window=8)) for r in range(3)]
        assert sorted(itertools.chain(*batches)) == list(range(COUNT))
        assert {len(rank) for rank in ranks} == {3}


def test_a_state_of_another_fold_of_the_same_size(lab):
    dataset = CachedDataset(lab.shared.folds)
    folds = np.asarray(dataset.table["fold"])
    first, second = (dataset.select(folds != fold) for fold in (0, 1))
    assert len(first) == len(second)
    state = CachedLoader(first, 4, shuffle=True).state_dict()
    with refuses(UsageError, "selection"):
        CachedLoader(second, 4, shuffle=True).load_state_dict(state)


def test_a_state_of_a_cache_with_other_labels(lab):
    state = CachedLoader(CachedDataset(lab.shared.cache), 4).state_dict()
    other = CachedLoader(CachedDataset(lab.shared.relabelled), 4)
    with refuses(UsageError, "cache|labels"):
        other.load_state_dict(state)


def test_a_state_of_another_order_or_window(lab):
    dataset = CachedDataset(lab.shared.cache)
    state = CachedLoader(dataset, 4, shuffle="block", window=8).state_dict()
    with refuses(UsageError, "shuffle"):
        CachedLoader(dataset, 4, shuffle="full").load_state_dict(state)
    other = CachedLoader(dataset, 4, shuffle="block", window=9)
    with refuses(UsageError, "window"):
        other.load_state_dict(state)


def test_a_state_that_was_written_by_hand(lab):
    loader = CachedLoader(CachedDataset(lab.shared.cache), 4)
    for wrong in ({"position": -1}, {"position": 10**9}, {"epoch": "1"}, {"seed": None}, {"position": 2.0}):
        with refuses(UsageError):
            loader.load_state_dict({**loader.state_dict(), **wrong})
    with refuses(UsageError):
        loader.load_state_dict({})


def test_variants_added_between_saving_and_loading_a_state(lab):
    cache = lab.folder / "cache"
    succeeded(lab.warmup(lab.shared.photos, cache, "--augment", "lab_module:invert"))
    loader = CachedLoader(CachedDataset(cache), 5, shuffle="block", window=8)
    whole = numbers(CachedLoader(CachedDataset(cache), 5, shuffle="block", window=8))
    begun = numbers(loader, 2)
    state = loader.state_dict()
    succeeded(lab.warmup(lab.shared.photos, cache, "--variants", 2, "--augment", "lab_module:invert"))
    later = CachedLoader(CachedDataset(cache), 5, shuffle="block", window=8)
    later.load_state_dict(state)
    assert begun + numbers(later) == whole


def test_loading_a_state_and_setting_the_same_epoch(lab):
    dataset = CachedDataset(lab.shared.cache)
    loader = CachedLoader(dataset, 5, shuffle=True, seed=3)
    loader.set_epoch(2)
    begun = numbers(loader, 3)
    again = CachedLoader(dataset, 5, shuffle=True)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(2)
    rest = numbers(again)
    assert (sorted(begun + rest), len(begun)) == (list(range(COUNT)), 15)


def test_continuing_on_other_ranks_and_another_batch_size(lab):
    dataset = CachedDataset(lab.shared.cache)
    loader = CachedLoader(dataset, 4, shuffle=True, seed=5)
    begun, found = numbers(loader, 2), []
    for rank in range(2):
        other = CachedLoader(dataset, 3, shuffle=True, rank=rank, world_size=2)
        other.load_state_dict(loader.state_dict())
        found += numbers(other)
    assert sorted(begun + found) == list(range(COUNT))


def test_saving_the_state_after_the_last_batch(lab):
    dataset = CachedDataset(lab.shared.cache)
    loader, again = CachedLoader(dataset, 8, shuffle=True), CachedLoader(dataset, 8, shuffle=True)
    numbers(loader, 3)
    again.load_state_dict(loader.state_dict())
    direct = CachedLoader(dataset, 8, shuffle=True)
    direct.set_epoch(1)
    assert (again.epoch, numbers(again)) == (1, numbers(direct))


def test_two_iterations_of_one_loader_side_by_side(lab):
    loader = CachedLoader(CachedDataset(lab.shared.cache), 4, shuffle=True)
    pairs = list(zip(loader, loader, strict=True))
    for (left, _), (right, _) in pairs:
        assert np.array_equal(left, right)
    first, second = iter(loader), iter(loader)
    next(second), next(first)
    with refuses(UsageError, "CachedLoader for each"):
        loader.state_dict()


def test_a_subclass_that_changes_samples(lab):
    class Doubled(CachedDataset):
        def __getitem__(self, index: int) -> object:
            image, label = super().__getitem__(index)
            return image // 2, label

    with refuses(UsageError, "DataLoader"):
        CachedLoader(Doubled(lab.shared.cache), 4)


def test_something_else_than_a_dataset(lab):
    for thing in (lab.shared.cache, [1, 2], None):
        with refuses(UsageError, "CachedDataset"):
            CachedLoader(thing, 4)


def test_a_shuffle_that_depends_on_threads(lab):
    dataset = CachedDataset(lab.shared.cache)
    orders = [
        numbers(CachedLoader(dataset, 5, shuffle=True, seed=9, threads=t, prefetch=p)) for t, p in ((1, 0), (4, 6))
    ]
    assert orders[0] == orders[1]
    assert sorted(map(number_of, dataset.paths)) == list(range(COUNT))
