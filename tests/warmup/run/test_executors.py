"""Workers: those that joblib keeps from one run to the next, and those that are forked from a builder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from joblib.externals.loky import process_executor
from patience import PATIENCE

from tpucache.errors import BuildError
from tpucache.warmup.run import executors
from tpucache.warmup.run.executors import Executor


def place() -> tuple[int, str, list[str]]:
    return os.getpid(), str(Path.cwd()), sys.path


@pytest.mark.slow
def test_workers_that_are_kept_follow_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.syspath_prepend(tmp_path / name / "modules")
        places = list(Executor(jobs=2).run((place, ()) for _ in range(8)))
        assert {(folder, *modules) for _, folder, modules in places} == {(str(tmp_path / name), *sys.path)}
        seen.append({process for process, _, _ in places})
    assert seen[0] & seen[1]  # or there was nothing to follow
    assert os.getpid() not in seen[0]


@pytest.mark.slow
def test_work_that_cannot_be_sent_is_one_error() -> None:
    held = threading.Lock()
    with pytest.raises(BuildError, match=r"cannot be sent to other processes: .*lock.*or build with --jobs 1"):
        list(Executor(jobs=2).run((place, (held,)) for _ in range(2)))


def test_few_tasks_run_here_as_long_as_workers_would_take_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "ALONE_SECONDS", 60)
    assert {process for process, _, _ in Executor(jobs=2).run(((place, ()) for _ in range(8)), few=True)} == {
        os.getpid()
    }


@pytest.mark.slow
def test_workers_take_over_few_tasks_that_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "ALONE_SECONDS", 0)
    first, *others = Executor(jobs=2).run(((place, ()) for _ in range(8)), few=True)
    assert first[0] == os.getpid()
    assert len(others) == 7
    assert os.getpid() not in {process for process, _, _ in others}


@pytest.mark.slow
def test_a_run_that_ends_early_says_nothing_of_the_tasks_under_way() -> None:
    run = Executor(jobs=2).run((time.sleep, (seconds,)) for seconds in (0, 0.5))
    next(run)
    run.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_ends_while_tasks_are_on_their_way_to_the_workers_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = process_executor._ExecutorManagerThread.process_result_item

    def slow(thread: Any, result: Any) -> None:
        note(thread, result)
        time.sleep(0.1)  # in which the run ends

    monkeypatch.setattr(process_executor._ExecutorManagerThread, "process_result_item", slow)
    for _ in range(3):
        run = Executor(jobs=2).run((time.sleep, (0,)) for _ in range(8))
        next(run)
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["Executor(jobs=2)", "ForkedWorkers(2, int)"])
def test_workers_end_soon_after_their_parent_was_killed(workers: str, tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom tpucache.warmup.run.executors import Executor, ForkedWorkers\n"
        f"pids = set({workers}.run((os.getpid, ()) for _ in range(8)))\n"
        "print(*pids, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    # Into a file: a worker that was given no task does not look for its parent, and would keep a pipe open.
    with (tmp_path / "pids").open("w") as pids:
        done = subprocess.run([sys.executable, "-c", code], stdout=pids, check=False, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL
    workers = [Path(f"/proc/{pid}/cmdline") for pid in (tmp_path / "pids").read_text().split()]
    assert workers
    for _ in range(600):
        if not any(path.exists() and path.read_bytes() for path in workers):  # of a dead process it is empty
            return
        time.sleep(0.05)
    pytest.fail("workers are still alive after 30 seconds")


FORKED = """
import os, sys, threading
from tpucache.errors import BuildError
from tpucache.warmup.run.executors import ForkedWorkers

def refuse(number):
    raise ValueError(number)

if __name__ == "__main__":
    closed = os.open(os.devnull, os.O_RDONLY)
    workers = ForkedWorkers(2, lambda: os.close(closed))
    done = [*workers.run((lambda number: (os.getpid(), number), (number,)) for number in range(40))]
    print(sorted(number for _, number in done) == [*range(40)], os.getpid() in dict(done), "joblib" in sys.modules)
    print([*workers.run((os.path.exists, (f"/proc/self/fd/{closed}",)) for _ in range(3))])
    for task in ((refuse, (8,)), (print, (threading.Lock(),)), (abs, (-1,)), (os._exit, (1,))):
        try:
            print([*workers.run(iter([task]))])
        except (BuildError, ValueError) as error:
            print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_forked_workers_run_what_joblibs_run(run_forking: Callable[..., str]) -> None:
    all_done, closed, refused, unsendable, after, dead = run_forking(FORKED).splitlines()
    assert all_done == "True False True"  # the function has no name, so that joblib's cloudpickle sent it
    assert closed == "[False, False, False]"
    assert refused == "ValueError 8"
    assert unsendable.startswith("BuildError the work cannot be sent to other processes: ")
    assert after == "[1]"
    assert dead.startswith("BuildError A worker process died")
