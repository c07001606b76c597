"""A time limit is kept wherever a run is, and what was done by then is kept, too."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from made import build_here, digests
from patience import PATIENCE, wait_for

from tpucache.errors import SampleError, UnfinishedError
from tpucache.recipe import Recipe
from tpucache.warmup.build import build_cache
from tpucache.warmup.build_options import Deadline
from tpucache.warmup.run import executors
from tpucache.warmup.sources.source import Item, Listing, Sample

_SAMPLES = 30
_SLOW, _LIMIT = 150.0, 600.0  # seconds of a Clock


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.time()
        monkeypatch.setattr(time, "time", lambda: self.now)

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@dataclass(frozen=True)
class Slow:
    loaded: list[int]
    clock: Clock | None = None  # of which loading takes as long
    list_seconds: float = 0.0
    bad: int = -1

    def list(self) -> Listing:
        time.sleep(self.list_seconds)
        return Listing([Sample(number, str(number), number % 2) for number in range(_SAMPLES)], ("ant", "bee"))

    def load(self, sample: Sample) -> Item:
        if self.clock is not None:
            self.clock.pass_seconds(_SLOW)
        self.loaded.append(sample.number)
        shape = (1, 3) if sample.number == self.bad else (1, 4)  # of rows, which nothing pads
        return Item({"tokens": np.full(shape, sample.number, np.int32)})


def test_a_time_limit_is_kept_and_no_sample_is_made_twice(tmp_path: Path, clock: Clock) -> None:
    cache, whole, recipe = tmp_path / "cache", tmp_path / "whole", Recipe(size=8)
    slow, fast = Slow([], clock=clock), Slow([])
    with pytest.raises(UnfinishedError) as caught:
        build_here(slow, cache, recipe, time_limit=_LIMIT)
    done = len(set(slow.loaded))
    assert 2 <= done < _SAMPLES
    assert f"{done} of {_SAMPLES} samples are finished" in str(caught.value)
    build_here(fast, cache, recipe)
    # The first is loaded to see what samples are like, whether they are padded, and to compare it with what is done.
    assert {*range(done, _SAMPLES)} <= {*fast.loaded} <= {*range(done, _SAMPLES), 0, *range(done)}
    assert len(fast.loaded) <= 2 + done + _SAMPLES - done
    build_here(Slow([]), whole, recipe)
    assert digests(cache) == digests(whole)


@pytest.mark.slow
def test_a_small_build_needs_no_workers_and_keeps_its_time_limit(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "ALONE_SECONDS", 600)
    cache, whole, recipe = tmp_path / "cache", tmp_path / "whole", Recipe(size=8)
    slow, fast = Slow([], clock), Slow([])
    with pytest.raises(UnfinishedError):
        build_cache(slow, cache, recipe, jobs=2, time_limit=_LIMIT)
    done = len(set(slow.loaded))  # in this process: a worker would have a list of its own
    assert 2 <= done < _SAMPLES
    build_cache(fast, cache, recipe, jobs=2)
    assert set(range(done, _SAMPLES)) <= set(fast.loaded)
    build_here(Slow([]), whole, recipe)
    assert digests(cache) == digests(whole)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_bad_sample_of_a_small_build_is_named_and_may_be_left_out(tmp_path: Path, jobs: int) -> None:
    cache, recipe, source = tmp_path / "cache", Recipe(size=8), Slow([], bad=7)
    with pytest.raises(SampleError, match="'7': field 'tokens' is"):
        build_cache(source, cache, recipe, jobs=jobs)
    assert build_cache(source, cache, recipe, jobs=jobs, on_error="skip").samples == _SAMPLES - 1


@pytest.mark.slow
def test_a_time_limit_is_kept_while_the_source_is_listed(tmp_path: Path) -> None:
    with pytest.raises(UnfinishedError) as caught:
        build_here(Slow([], list_seconds=PATIENCE), tmp_path / "cache", time_limit=0.1)
    assert "while the source was listed" in str(caught.value)
    assert "longer time limit" in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_an_alarm_of_somebody_elses_is_put_back() -> None:
    rang: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: rang.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with Deadline.of(9).interrupting("nothing was done"):
            pass
        wait_for(lambda: rang)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rang == [signal.SIGALRM]


def test_without_a_time_limit_it_is_never_late() -> None:
    assert not Deadline.of(None).is_past
    assert Deadline.of(0).is_past
    assert not Deadline.of(60).is_past
