"""Memory is given once, as far as there is some, and a forked process has a budget of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tpucache.loading.reading.memory import MemoryBudget


class Owner:
    """Somebody who needs memory."""


def budget_of(left: list[int]) -> MemoryBudget:
    """Return the budget of a machine with as many bytes free as the list says, which a test may change."""
    return MemoryBudget(lambda: left[0])


def test_half_of_what_was_free_is_given_whether_it_is_used_at_once_or_later() -> None:
    for is_used in (True, False):
        free = [1000]
        shared, owner = budget_of(free), Owner()
        assert shared.take(owner, 300, is_used=is_used)
        free[0] -= 300 if is_used else 0
        assert shared.room == 200
        assert not shared.take(owner, 201)
        assert shared.take(owner, 200)


def test_an_eighth_of_what_was_free_at_first_is_left() -> None:
    free = [1000]
    shared = budget_of(free)
    assert shared.room == 500
    free[0] = 130  # others took the rest
    assert shared.room == 5
    free[0] = 100
    assert shared.room == -25
    assert not shared.take(Owner(), 1)


def test_what_was_given_comes_back_with_the_end_of_its_owner() -> None:
    free = [1000]
    shared, owner = budget_of(free), Owner()
    assert shared.take(owner, 500, is_used=False)
    assert shared.room == 0
    del owner
    assert shared.room == 500
    assert free == [1000]


def test_a_promise_may_be_of_all_that_is_free_and_is_made_once() -> None:
    free = [1000]
    shared, first, second = budget_of(free), Owner(), Owner()
    assert not shared.promise(first, 1001)
    assert shared.promise(first, 1000)
    assert shared.free == 0
    assert not shared.promise(second, 1)
    shared.use(first, 400)
    free[0] -= 400
    assert shared.free == 0
    shared.forget_promises()
    assert shared.free == 600


FORKING = """
import ctypes, os, sys
import numpy as np
from tpucache.loading.reading.memory import BUDGET
from tpucache.loading.reading.memory import RecordMemory

FREE = 1000
BUDGET.available = lambda: FREE

def keep(memory, numbers):
    def write(which, addresses):
        for number, address in zip(numbers[which].tolist(), addresses.tolist()):
            ctypes.memset(address, number, 10)
    memory.keep(numbers, write)

def state(memory):
    kept = sum(ctypes.string_at(at, 10) == bytes([number]) * 10
               for number, at in enumerate(memory.addresses(np.arange(50)).tolist()) if at)
    return kept, memory.granted, BUDGET.free

memory = RecordMemory(10, 50, 50)
assert memory.promise()
keep(memory, np.arange(20))
process = os.fork()
if process == 0:
    FREE = int(sys.argv[1])
    keep(memory, np.arange(50))
    print("child", *state(memory), flush=True)
    os._exit(0)
assert os.waitpid(process, 0)[1] == 0
keep(memory, np.arange(50))
print("parent", *state(memory))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("free", "kept"), [(0, 20), (1000, 50)])
def test_a_forked_process_keeps_no_more_than_was_kept_before_and_its_own_budget_allows(
    free: int, kept: int, run_forking: Callable[..., str]
) -> None:
    # Records kept, bytes granted, bytes that are free and not promised.
    assert run_forking(FORKING, free) == f"child {kept} {10 * kept} {free}\nparent 50 500 1000\n"
