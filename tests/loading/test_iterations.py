"""Whatever is begun, left, continued, copied or set aside: an iteration shows its epoch, from where it began."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from thorough import examples
from torch.utils.data import RandomSampler

from tpucache import CachedDataset, CachedLoader, MixedLoader, UsageError
from tpucache.loading.ahead import Ahead

SAMPLES, BATCH = 26, 4

#: How a loader orders its samples.
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "full": lambda: {"shuffle": True},
    "drop_last": lambda: {"shuffle": True, "drop_last": True},
    "block": lambda: {"shuffle": "block", "window": 8},
    "weights": lambda: {"weights": np.arange(1.0, SAMPLES + 1)},
    "balance": lambda: {"balance": True},
    "sampler": lambda: {"sampler": RandomSampler(range(SAMPLES))},
    "mixed": lambda: {"shuffle": True},
}


opened = functools.cache(functools.partial(CachedDataset, in_memory=True))


def make(cache: Path, kind: str, batch: int = BATCH, **options: Any) -> Any:
    dataset, options = opened(cache, "epoch" if kind == "block" else 0)[:SAMPLES], {**KINDS[kind](), **options}
    if kind != "mixed":
        return CachedLoader(dataset, batch, **options)
    parts = enumerate((dataset[:16], dataset[16:]))
    return MixedLoader([CachedLoader(part, batch, **{**options, "seed": at}) for at, part in parts], shares=[2, 1])


def shown(batches: Iterable[Any]) -> list[bytes]:
    """Tell samples by their bytes: all images of the cache differ."""
    return [image.contiguous().numpy().tobytes() for images, _ in batches for image in images]


@functools.cache
def order(cache: Path, kind: str, epoch: int) -> list[bytes]:
    loader = make(cache, kind, 1, seed=5)
    loader.set_epoch(epoch)
    return shown(loader)


class Iterations(RuleBasedStateMachine):
    """Iterations of a loader, beside what they are to show."""

    def __init__(self, cache: Path, kind: str) -> None:
        super().__init__()
        self.make, self.order = (functools.partial(each, cache, kind) for each in (make, order))
        self.running: list[tuple[Iterator[Any], int, list[int]]] = []  # each with its number, epoch and position
        self.begun = self.outdated = 0  # how many have begun, and how many of them before the loader was set
        self.place = self.following = (0, 0)  # the state, and the start of what begins next: epoch and position
        self.is_ambiguous = False

    @initialize(reiterate=st.sampled_from(["next", "same"]))
    def open(self, reiterate: str) -> None:
        self.is_next, self.loader = reiterate == "next", self.make(seed=5, reiterate=reiterate)
        self.size = len(self.loader) * BATCH if self.loader.drop_last else SAMPLES

    def after(self, epoch: int, position: int) -> tuple[int, int]:
        return (epoch, position) if position < self.size else (epoch + 1, 0)

    def go_to(self, place: tuple[int, int]) -> None:
        self.place = self.following = place
        self.outdated, self.is_ambiguous = self.begun, False

    @rule(count=st.integers(0, 8))
    def begin(self, count: int) -> None:
        self.note_begun(iter(self.loader))
        self.take(1, count)

    @rule(first=st.integers(1, 3), second=st.integers(1, 3), again=st.integers(1, 3))
    def begin_beside(self, first: int, second: int, again: int) -> None:
        """Begin two, and go on with the earlier one."""
        for count in (first, second):
            self.begin(count)
        self.take(2, again)

    def note_begun(self, iterator: Iterator[Any]) -> None:
        self.begun += 1
        self.running = [*self.running[-2:], (iterator, self.begun, [*self.following])]
        self.place, self.is_ambiguous = self.following, False

    @precondition(lambda self: self.running)
    @rule(back=st.integers(1, 3), count=st.integers(0, 8))
    def take(self, back: int, count: int) -> None:
        iterator, number, where = self.running[-min(back, len(self.running))]
        epoch, start = where
        found = shown(itertools.islice(iterator, count))
        where[1] = stop = min(start + count * BATCH, self.size)
        assert found == self.order(epoch)[start:stop]
        if stop == start:
            return
        if number > self.outdated:
            place = self.after(epoch, stop)
            self.place = place if number == self.begun else self.place
            following = max(place[0], epoch + self.is_next), 0
            self.following = following if self.following[0] == epoch else max(following, self.following)
        self.is_ambiguous |= number <= self.outdated or number < self.begun

    @rule(depth=st.integers(1, 5), count=st.integers(0, 8))
    def read_ahead(self, depth: int, count: int) -> None:
        """Whatever was read, what was not taken is not gone."""
        with Ahead(self.loader, lambda batch, _: batch, depth) as ahead:
            self.note_begun(iter(ahead))
            self.take(1, count)
        self.running.pop()

    @rule(ahead=st.integers(-1, 1))
    def set_epoch(self, ahead: int) -> None:
        epoch = max(0, self.following[0] + ahead)
        self.loader.set_epoch(epoch)
        self.go_to((epoch, self.following[1] if epoch == self.following[0] else 0))

    @rule(copied=st.sampled_from([copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]))
    def copy(self, copied: Callable[[Any], Any]) -> None:
        self.loader, self.running = copied(self.loader), []
        self.begun = self.outdated = 0
        assert self.loader.metrics()["batches"] == 0

    @precondition(lambda self: not self.is_ambiguous)
    @rule(ranks=st.sampled_from([1, 2]), batch=st.sampled_from([1, 3]), is_set=st.booleans())
    def continue_elsewhere(self, ranks: int, batch: int, is_set: bool) -> None:
        state, (epoch, position) = self.loader.state_dict(), self.place
        others = [self.make(batch=batch, rank=rank, world_size=ranks) for rank in range(ranks)]
        for other in others:
            other.load_state_dict(state)
            if is_set:  # as trainers do
                other.set_epoch(epoch)
        found = shown(itertools.chain.from_iterable(zip(*others, strict=True)))
        rest = self.order(epoch)[position:]
        assert found == rest[: len(rest) // (ranks * batch) * ranks * batch if self.loader.drop_last else None]
        assert {other.epoch for other in others} == {epoch + 1}
        self.loader.load_state_dict(state)
        self.go_to(self.place)

    @invariant()
    def is_where_it_says(self) -> None:
        assert self.loader.epoch == self.place[0]
        if self.is_ambiguous:
            with pytest.raises(UsageError, match="no single position"):
                self.loader.state_dict()
        else:
            state = self.loader.state_dict()
            assert (state["epoch"], state["position"]) == self.place


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_iterations_show_what_they_are_to_show(cache: Path, kind: str) -> None:
    run_state_machine_as_test(
        lambda: Iterations(cache, kind), settings=settings(max_examples=examples(60), stateful_step_count=20)
    )
