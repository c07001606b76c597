"""Loaders that draw by weights, classes or a torch Sampler: the same on any ranks, and continued in mid-epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from tpucache import CachedDataset, CachedLoader, UsageError
from tpucache.loading.reading.record_reader import WaysRead

WEIGHTS = np.random.RandomState(1).random_sample(150) ** 3


def own_generator() -> RandomSampler:
    return RandomSampler(range(150), generator=torch.Generator().manual_seed(7))


KINDS: dict[str, Any] = {
    "weights": lambda: {"weights": WEIGHTS},
    "balance": lambda: {"balance": True},
    "sampler": lambda: {"sampler": SubsetRandomSampler(range(0, 150, 2))},
    "own generator": lambda: {"sampler": own_generator()},
    "torch weights": lambda: {"sampler": WeightedRandomSampler(WEIGHTS.tolist(), 64)},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def _indices(own: Any) -> tuple[list[int], int, WaysRead]:
    return own.tolist(), len(own), WaysRead()


class Shown(CachedLoader):
    """A loader whose batches are the indices of their samples."""

    def _begin(self, **how: Any) -> Any:
        iteration: Any = super()._begin(**how)
        iteration._read = lambda batch, *_: _indices(iteration._own(batch))
        return iteration


def loader(cache: Path, size: int, kind: str, **more: Any) -> Shown:
    return Shown(CachedDataset(cache), size, seed=4, drop_last=True, **KINDS[kind](), **more)


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def taken(batches: Iterator[Any], count: int) -> list[Any]:
    return [next(batches) for _ in range(count)]


@kinds
def test_a_state_of_another_sampling_is_refused(cache: Path, kind: str) -> None:
    state = loader(cache, 16, kind).state_dict()
    for other in KINDS.keys() - {kind}:
        with pytest.raises(UsageError, match="cannot be continued here"):
            loader(cache, 16, other).load_state_dict(state)
    with pytest.raises(UsageError, match="cannot be continued here"):
        Shown(CachedDataset(cache), 16, shuffle=True).load_state_dict(state)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16, "list of tensors"], ids=str)
def test_weights_that_require_a_gradient_are_their_values(kind: object, cache: Path) -> None:
    dataset = CachedDataset(cache).select(range(64))
    plain = np.arange(64) % 4
    weights = torch.tensor(plain, dtype=kind if isinstance(kind, torch.dtype) else torch.float64)
    given = list(weights) if kind == "list of tensors" else weights.requires_grad_()
    for one, other in zip(
        CachedLoader(dataset, 16, weights=given), CachedLoader(dataset, 16, weights=plain), strict=True
    ):
        assert torch.equal(one[0], other[0])


def test_a_state_of_other_weights_or_another_seed_of_a_generator_is_refused(cache: Path) -> None:
    dataset = CachedDataset(cache)
    state = CachedLoader(dataset, 16, weights=WEIGHTS).state_dict()
    with pytest.raises(UsageError, match="order"):
        CachedLoader(dataset, 16, weights=WEIGHTS + 1e-9).load_state_dict(state)
    state = CachedLoader(dataset, 16, sampler=own_generator()).state_dict()
    other = RandomSampler(range(150), generator=torch.Generator().manual_seed(8))
    with pytest.raises(UsageError, match="another order in epoch 0"):
        CachedLoader(dataset, 16, sampler=other).load_state_dict(state)


def test_a_sampler_leaves_all_random_numbers_as_they_were(cache: Path) -> None:
    sampler = own_generator()
    torch.manual_seed(3)
    before = torch.get_rng_state(), sampler.generator.get_state()
    list(Shown(CachedDataset(cache), 16, sampler=sampler))
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], sampler.generator.get_state())


class Given(Sampler[Any]):
    """A sampler of what it is given."""

    def __init__(self, indices: Any, length: int | None = None) -> None:
        self.indices, self.length = indices, len(indices) if length is None else length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([index + self.epoch for index in self.indices])

    def __len__(self) -> int:
        return self.length


class Unlimited(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_sampler_is_told_the_epoch_by_set_epoch(cache: Path) -> None:
    shown = Shown(CachedDataset(cache), 3, sampler=Given([1, 5, 9]))
    assert [list(shown), list(shown)] == [[[1, 5, 9]], [[2, 6, 10]]]


@pytest.mark.parametrize(
    ("message", "name", "values"),
    [
        ("gives batches", "sampler", [BatchSampler(SequentialSampler(range(64)), 4, False)]),
        ("gives batches", "sampler", [Given([np.array([1, 2])]), Given([np.array([1, 2]), np.array([3])])]),
        ("rank and world_size", "sampler", [DistributedSampler(range(64), num_replicas=2, rank=0)]),
        ("torch.utils.data.Sampler, not list", "sampler", [[1, 2, 3]]),
        ("no __len__", "sampler", [Unlimited()]),
        ("Given is not for this dataset: indices of 64 samples", "sampler", [Given([1, 64])]),
        ("whole numbers", "sampler", [Given([0.5])]),
        ("gives 2 indices in epoch 0, but its __len__ returns 3", "sampler", [Given([1, 2], 3)]),
        (
            "weights",
            "weights",
            [
                torch.ones(64).to_sparse(),
                torch.ones(64, device="meta"),
                torch.ones(64, dtype=torch.complex64),
                torch.ones(64).requires_grad_()[:3],
                [torch.ones((), requires_grad=True)] * 64,
                [[1.0], [1.0, 2.0]],
                torch.full((64,), -1.0, requires_grad=True),
                torch.full((64,), np.nan),
                np.ones(64, complex),
                ["a"] * 64,
                object(),
            ],
        ),
        ("weights and balance each say", "weights balance", [(WEIGHTS[:64], True)]),
        ("balance decides the order itself", "shuffle balance", [("block", True)]),
        ("balance is True or False", "balance", [1]),
    ],
)
def test_ways_of_sampling_that_cannot_be_are_refused(cache: Path, message: str, name: str, values: list[Any]) -> None:
    for value in values:
        options = dict(zip(name.split(), value if " " in name else [value], strict=True))
        with pytest.raises(UsageError, match=message):
            iter(CachedLoader(CachedDataset(cache).select(range(64)), 4, **options))


def test_classes_of_several_labels_are_not_balanced(cache: Path) -> None:
    class Several(CachedDataset):
        @property
        def labels(self) -> torch.Tensor:
            return torch.zeros(len(self), 3)

    with pytest.raises(UsageError, match="multilabel"):
        CachedLoader(Several(cache), 4, balance=True)
