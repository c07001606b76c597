"""Every second of a run belongs to one part, so that the parts add up to the time by the clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.training.feed.account import PARTS, Account


class World:
    """A clock, and counters of what is compiled and waited for."""

    def __init__(self):
        self.now = self.compiled = self.waited = 0.0

    def clock(self):
        return self.now

    def watch(self, account):
        account.take_out("compiling", lambda: self.compiled)
        account.take_out("waiting", lambda: self.waited)


def test_time_is_of_the_part_that_runs_without_compiling_and_waiting():
    world = World()
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
    account = Account(clock=World().clock)
    account.add_earlier({"steps": 3.0}, 4.0)
    account.add_earlier({"steps": 30.0}, 40.0)
    assert (account.seconds()["steps"], account.wall_seconds()) == (3.0, 4.0)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(PARTS), st.floats(0, 10), st.floats(0, 1), st.floats(0, 1)), max_size=20))
def test_parts_add_up_whatever_happens_in_them(events):
    world = World()
    account = Account(clock=world.clock)
    world.watch(account)
    for part, seconds, compiling, waiting in events:
        account.begin(part)
        world.now += seconds
        world.compiled += seconds * compiling / 2
        world.waited += seconds * waiting / 2
    assert sum(account.seconds().values()) == pytest.approx(account.wall_seconds())
    assert min(account.seconds().values()) >= -1e-9
