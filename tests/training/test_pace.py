"""Idle time is what the device did not run; every second belongs to one part of a run."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.training.device import Counters, Processes
from tpucache.training.device.base import BusyTime
from tpucache.training.pace import PARTS, WARMUP_EXECUTIONS, Account, Building, Pace, PaceMeter, ceiling
from tpucache.training.settings import TrainSettings

STEP, BATCH, STEPS = 0.25, 4, 30
PACE = Pace(100, 1000.0, 0.1, waited=0.0, device_idle=0.0, compiles=0, received_bytes=0)


@dataclass
class World:
    """A clock, and a device and a feeder that live by it."""

    now: float = 0.0
    executed: float = 0.0
    compiles: int = 0
    waited_seconds: float = 0.0
    sent_bytes: int = 0
    cpu_seconds: float = 0.0
    processes = Processes()

    def wait_for_data(self, seconds):
        self.now += seconds
        self.waited_seconds += seconds

    def execute(self):
        self.now += STEP
        self.executed += STEP

    def wait(self):
        """The device has always run what it was sent."""

    def counters(self):
        return Counters(self.compiles, self.executed, int(100 * self.executed))


@pytest.fixture
def world(monkeypatch):
    world = World()
    monkeypatch.setattr(time, "perf_counter", lambda: world.now)
    return world


@pytest.mark.parametrize("share", [0.0, 0.6, 0.95])
def test_all_three_figures_tell_the_share_that_a_slow_loader_costs(world, share):
    warmed = []
    meter = PaceMeter(world, world, lambda: warmed.append(world.now))
    meter.resume()
    for number in range(STEPS):
        world.wait_for_data(STEP * share / (1 - share))
        world.execute()
        world.compiles += number < WARMUP_EXECUTIONS
        meter.step(1, BATCH)
    meter.pause()
    pace = meter.pace().with_ceiling(ceiling(world.execute, world, BATCH))
    assert pace.steps == STEPS - WARMUP_EXECUTIONS
    assert len(warmed) == 1
    assert pace.compiles == 0
    assert pace.step_seconds == pytest.approx(STEP / (1 - share))
    assert pace.images_per_second == pytest.approx(BATCH / pace.step_seconds)
    assert (pace.waited, pace.device_idle, pace.ceiling_idle) == pytest.approx((share,) * 3)


@pytest.mark.parametrize(("seconds", "taken"), [(0.0, 1.25), (1.5, 1.5), (60.0, 2.0)])
def test_a_replay_takes_as_long_as_it_is_told_and_two_seconds_at_most(world, seconds, taken):
    assert ceiling(world.execute, world, BATCH, seconds) == pytest.approx(BATCH / STEP)
    assert world.executed - STEP == taken  # five steps at least


def test_what_is_paused_does_not_count(world):
    meter = PaceMeter(world, world)
    for _ in range(STEPS):
        world.execute()
        meter.step(1, BATCH)
        meter.pause()
        world.wait_for_data(7.0)  # an evaluation, say
        meter.resume()
    assert meter.pace().step_seconds == pytest.approx(STEP)
    assert meter.pace().waited == 0


def test_what_compiles_after_the_warm_up_is_counted(world):
    meter = PaceMeter(world, world)
    for number in range(STEPS):
        world.execute()
        world.compiles += number in (0, 9)
        meter.step(1, BATCH)
    assert meter.pace().compiles == 1


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"steps": 0}, "Too few steps"),
        ({"compiles": 3}, "3 graphs"),
        ({"waited": 0.4, "device_idle": 0.4}, r"Data limits the run \(the device has no data 40% of the time"),
        ({"waited": 0.96, "device_idle": 0.33}, r"Data limits the run \(the device has no data 33% of the time"),
        ({"waited": 0.91}, "The device limits the run"),  # the loop was blocked, but the device had work all the time
        ({"waited": 0.06, "device_idle": 0.3}, "--steps-per-execution 4"),
        ({"device_idle": 0.3}, "--steps-per-execution 4"),
        ({"ceiling_idle": 0.3}, "longer than on data that is already on the device"),
        ({}, "The device limits the run"),
    ],
)
def test_one_sentence_says_what_limits_the_run(changed, text):
    assert re.search(text, replace(PACE, **changed).advice())


def test_the_advice_is_not_to_do_what_is_done_already():
    late, slow = replace(PACE, waited=0.4, device_idle=0.4), replace(PACE, device_idle=0.3)
    used = TrainSettings(steps_per_execution=4, precision="bf16", threads=8)
    assert "tpucache fetch" in late.advice(used)
    assert "tpucache fetch" not in late.advice(used, in_memory=True)
    assert "more than 8 --threads" in late.advice(used, in_memory=True)
    assert "--steps-per-execution 16" in slow.advice(used)
    assert "--precision bf16" in PACE.advice()
    assert "bf16" not in PACE.advice(used)


def test_the_pace_of_several_processes_is_that_of_the_slowest():
    late = replace(PACE, images_per_second=800.0, waited=0.3, received_bytes=5)
    pace = Pace.slowest([PACE.with_ceiling(2000.0), late.with_ceiling(1600.0)])
    assert (pace.images_per_second, pace.waited, pace.received_bytes, pace.ceiling_idle) == (800.0, 0.3, 5, 0.5)


def test_busy_time_is_that_of_the_device_however_early_executions_were_sent():
    busy = BusyTime()
    for sent, ended in [(0.0, 1.0), (0.1, 2.0), (1.0, 3.0), (5.0, 6.0), (5.1, 7.0), (9.0, 9.5)]:
        busy.add(sent, ended)
    assert busy.seconds == pytest.approx(3.0 + 2.0 + 0.5)
    busy.add(9.0, 9.2)  # of another counter: it ended while the one before ran
    assert busy.seconds == pytest.approx(5.5)


def test_waiting_is_told_of_the_epochs_that_built_the_cache_and_of_the_others() -> None:
    clock = Counted()

    def pass_time(seconds: float, waited: float) -> None:
        clock.now, clock.waited = clock.now + seconds, clock.waited + waited

    shown: Any = SimpleNamespace(
        is_finished=False,
        place="kept",
        cache=SimpleNamespace(built=0.25, is_growing=True),
        manifest=SimpleNamespace(total_bytes=7),
    )
    building = Building(shown, clock.clock)
    building.begin(lambda: clock.waited)
    pass_time(10, 8)
    assert building.text == "cache built 25%, waited 80%"
    building.begin(lambda: clock.waited)  # after the warm-up, which does not end it
    building.end()
    building.end_epoch()
    pass_time(100, 0)  # an evaluation
    building.end()  # a stop in it
    shown.is_finished = True
    for _ in range(2):
        building.begin(lambda: clock.waited)
        pass_time(5, 1)
        building.end()
        building.end_epoch()
    assert building.text == ""
    assert building.to_dict() == {"cache": "kept", "bytes": 7, "epochs": 1, "waited": 0.8, "later": 0.2}


def test_of_a_finished_cache_nothing_is_told() -> None:
    finished: Any = SimpleNamespace(cache=SimpleNamespace(is_growing=False))
    building = Building(finished)
    building.begin(lambda: 0.0)
    building.end()
    assert (building.text, building.to_dict()) == ("", {})


class Counted:
    """A clock, and counters of what is compiled and waited for."""

    def __init__(self):
        self.now = self.compiled = self.waited = 0.0

    def clock(self):
        return self.now

    def watch(self, account):
        account.take_out("compiling", lambda: self.compiled)
        account.take_out("waiting", lambda: self.waited)


def test_time_is_of_the_part_that_runs_without_compiling_and_waiting():
    world = Counted()
    account = Account(-3.0, world.clock)
    world.now += 1
    world.watch(account)
    account.begin("steps")
    world.now += 10
    world.compiled += 4
    world.waited += 2
    with account.part("evaluation"):
        world.now += 5
        with account.part("metrics"):
            world.now += 0.5
        world.now += 1
    world.now += 1
    found = account.seconds()
    assert found == {
        **dict.fromkeys(PARTS, 0.0),
        "start_up": 4.0, "steps": 5.0, "compiling": 4.0, "waiting": 2.0, "evaluation": 6.0, "metrics": 0.5,
    }  # fmt: skip
    assert account.wall_seconds() == sum(found.values()) == 21.5


def test_what_earlier_processes_took_is_added_once():
    account = Account(clock=Counted().clock)
    account.add_earlier({"steps": 3.0}, 4.0)
    account.add_earlier({"steps": 30.0}, 40.0)
    assert (account.seconds()["steps"], account.wall_seconds()) == (3.0, 4.0)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(PARTS), st.floats(0, 10), st.floats(0, 1), st.floats(0, 1)), max_size=20))
def test_parts_add_up_whatever_happens_in_them(events):
    world = Counted()
    account = Account(clock=world.clock)
    world.watch(account)
    for part, seconds, compiling, waiting in events:
        account.begin(part)
        world.now += seconds
        world.compiled += seconds * compiling / 2
        world.waited += seconds * waiting / 2
    assert sum(account.seconds().values()) == pytest.approx(account.wall_seconds())
    assert min(account.seconds().values()) >= -1e-9
