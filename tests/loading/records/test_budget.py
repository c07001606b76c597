"""The budget is one process's: what it promised is not promised to a process that is forked from it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FORKING = """
import ctypes, os, sys
import numpy as np
from tpucache.loading.records import budget
from tpucache.loading.records.budget import BUDGET
from tpucache.loading.records.memory import RecordMemory

FREE = 1000
budget.available_memory = lambda: FREE

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
assert len(os.listdir("/proc/self/task")) == 1, "a process that has threads must not be forked"
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
def test_a_forked_process_keeps_no_more_than_was_kept_before_and_its_own_budget_allows(free: int, kept: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(free)],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # so that numpy starts no threads
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # Records kept, bytes granted, bytes that are free and not promised.
    assert done.stdout.splitlines() == [f"child {kept} {10 * kept} {free}", "parent 50 500 1000"]
