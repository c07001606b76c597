"""Loaders, their states and ranks."""

from __future__ import annotations

import itertools

import numpy as np

from scripts.checks.misuse.lab import COUNT, Lab, array, number_of, pixels
from scripts.checks.misuse.outcome import Outcome, correct, equal, refuses, succeeded
from scripts.checks.misuse.rows import row
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


@row
def sizes_threads_and_seeds_that_make_no_sense(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    bad = [("batch_size", value) for value in (0, -1, 2.5, True, "8", None)]
    bad += [("threads", 0), ("prefetch", -1), ("window", 0), ("seed", -1), ("seed", 1.5), ("world_size", 0)]
    bad += [("rank", 1), ("rank", -1), ("shuffle", "Full"), ("shuffle", 1), ("shuffle", None), ("drop_last", "no")]
    for name, value in bad:
        outcome = refuses(lambda o={"batch_size": 4, name: value}: CachedLoader(dataset, **o), UsageError, name)
    return outcome


@row
def more_ranks_than_samples(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache()).select(range(3))
    return refuses(lambda: CachedLoader(dataset, 1, world_size=4), UsageError, "4 ranks", "drop_last")


@row
def ranks_of_uneven_shares(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    for shuffle in (False, "full", "block"):
        ranks = [CachedLoader(dataset, 3, shuffle=shuffle, rank=rank, world_size=3, window=8) for rank in range(3)]
        batches = [numbers(CachedLoader(dataset, 3, shuffle=shuffle, rank=r, world_size=3, window=8)) for r in range(3)]
        equal("samples of all ranks", sorted(itertools.chain(*batches)), list(range(COUNT)))
        equal("batches of each rank", {len(rank) for rank in ranks}, {3})
    return correct("each sample once over three ranks, in each order; equally many batches")


@row
def a_state_of_another_fold_of_the_same_size(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.folds())
    folds = np.asarray(dataset.table["fold"])
    first, second = (dataset.select(folds != fold) for fold in (0, 1))
    equal("sizes", len(first), len(second))
    state = CachedLoader(first, 4, shuffle=True).state_dict()
    return refuses(lambda: CachedLoader(second, 4, shuffle=True).load_state_dict(state), UsageError, "selection")


@row
def a_state_of_a_cache_with_other_labels(lab: Lab) -> Outcome:
    state = CachedLoader(CachedDataset(lab.shared.cache()), 4).state_dict()
    other = CachedLoader(CachedDataset(lab.shared.relabelled()), 4)
    return refuses(lambda: other.load_state_dict(state), UsageError, "cache|labels")


@row
def a_state_of_another_order_or_window(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    state = CachedLoader(dataset, 4, shuffle="block", window=8).state_dict()
    refuses(lambda: CachedLoader(dataset, 4, shuffle="full").load_state_dict(state), UsageError, "shuffle")
    other = CachedLoader(dataset, 4, shuffle="block", window=9)
    return refuses(lambda: other.load_state_dict(state), UsageError, "window")


@row
def a_state_that_was_written_by_hand(lab: Lab) -> Outcome:
    loader = CachedLoader(CachedDataset(lab.shared.cache()), 4)
    for wrong in ({"position": -1}, {"position": 10**9}, {"epoch": "1"}, {"seed": None}, {"position": 2.0}):
        outcome = refuses(lambda w=wrong: loader.load_state_dict({**loader.state_dict(), **w}), UsageError)
    refuses(lambda: loader.load_state_dict({}), UsageError)
    return outcome


@row
def variants_added_between_saving_and_loading_a_state(lab: Lab) -> Outcome:
    cache = lab.folder / "cache"
    succeeded(lab.warmup(lab.shared.photos(), cache, "--augment", "lab_module:invert"))
    loader = CachedLoader(CachedDataset(cache), 5, shuffle="block", window=8)
    whole = numbers(CachedLoader(CachedDataset(cache), 5, shuffle="block", window=8))
    begun = numbers(loader, 2)
    state = loader.state_dict()
    succeeded(lab.warmup(lab.shared.photos(), cache, "--variants", 2, "--augment", "lab_module:invert"))
    later = CachedLoader(CachedDataset(cache), 5, shuffle="block", window=8)
    later.load_state_dict(state)
    equal("the epoch in two parts", begun + numbers(later), whole)
    return correct("the rest of the epoch is what was missing, in the order it had")


@row
def loading_a_state_and_setting_the_same_epoch(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    loader = CachedLoader(dataset, 5, shuffle=True, seed=3)
    loader.set_epoch(2)
    begun = numbers(loader, 3)
    again = CachedLoader(dataset, 5, shuffle=True)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(2)
    rest = numbers(again)
    equal("both parts", (sorted(begun + rest), len(begun)), (list(range(COUNT)), 15))
    return correct("the position is kept: 15 samples before, the other 9 after")


@row
def continuing_on_other_ranks_and_another_batch_size(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    loader = CachedLoader(dataset, 4, shuffle=True, seed=5)
    begun, found = numbers(loader, 2), []
    for rank in range(2):
        other = CachedLoader(dataset, 3, shuffle=True, rank=rank, world_size=2)
        other.load_state_dict(loader.state_dict())
        found += numbers(other)
    equal("samples before and after", sorted(begun + found), list(range(COUNT)))
    return correct("8 samples of one rank and 16 of two make the epoch, none twice")


@row
def saving_the_state_after_the_last_batch(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    loader, again = CachedLoader(dataset, 8, shuffle=True), CachedLoader(dataset, 8, shuffle=True)
    numbers(loader, 3)
    again.load_state_dict(loader.state_dict())
    direct = CachedLoader(dataset, 8, shuffle=True)
    direct.set_epoch(1)
    equal("the next epoch", (again.epoch, numbers(again)), (1, numbers(direct)))
    return correct("three of three batches are an epoch: the next one follows, whole")


@row
def two_iterations_of_one_loader_side_by_side(lab: Lab) -> Outcome:
    loader = CachedLoader(CachedDataset(lab.shared.cache()), 4, shuffle=True)
    pairs = list(zip(loader, loader, strict=True))
    for (left, _), (right, _) in pairs:
        equal("batches of the same epoch", np.array_equal(left, right), True)
    first, second = iter(loader), iter(loader)
    next(second), next(first)
    return refuses(loader.state_dict, UsageError, "CachedLoader for each")


@row
def a_subclass_that_changes_samples(lab: Lab) -> Outcome:
    class Doubled(CachedDataset):
        def __getitem__(self, index: int) -> object:
            image, label = super().__getitem__(index)
            return image // 2, label

    return refuses(lambda: CachedLoader(Doubled(lab.shared.cache()), 4), UsageError, "DataLoader")


@row
def something_else_than_a_dataset(lab: Lab) -> Outcome:
    for thing in (lab.shared.cache(), [1, 2], None):
        outcome = refuses(lambda thing=thing: CachedLoader(thing, 4), UsageError, "CachedDataset")
    return outcome


@row
def a_shuffle_that_depends_on_threads(lab: Lab) -> Outcome:
    dataset = CachedDataset(lab.shared.cache())
    orders = [
        numbers(CachedLoader(dataset, 5, shuffle=True, seed=9, threads=t, prefetch=p)) for t, p in ((1, 0), (4, 6))
    ]
    equal("orders", orders[0], orders[1])
    equal("paths", sorted(map(number_of, dataset.paths)), list(range(COUNT)))
    return correct("1 thread without and 4 threads with prefetching give the same order")
