"""Tests fork only where nothing else runs, and leave no process behind."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import processes
import pytest
from patience import PATIENCE

WAITING = "import subprocess, sys; print(subprocess.Popen(['sleep', '100'], stdout=subprocess.DEVNULL).pid)"


@pytest.mark.parametrize("fork", [os.fork, os.forkpty])
def test_a_test_that_forks_fails_at_once_and_is_told_what_to_do(fork) -> None:
    with pytest.raises(pytest.fail.Exception, match="Start a new Python"):
        os._exit(0) if fork() in (0, (0, -1)) else None


@pytest.mark.slow
def test_a_process_that_tests_start_may_fork_while_it_has_one_thread_alone(run_forking) -> None:
    forks = "import os\nprocess = os.fork()\nif not process: os._exit(0)\nprint(os.waitpid(process, 0)[1])\n"
    assert run_forking(forks) == "0\n"
    beside = "import threading\nend = threading.Event()\nthreading.Thread(target=end.wait, args=(60,)).start()\n"
    caught = "\ntry:\n    os.fork()\nexcept RuntimeError as error:\n    print(error)\nend.set()\n"
    assert run_forking(f"import os\n{beside}{caught}").startswith("this process forks while it has 2 threads: ")


@pytest.mark.slow
@pytest.mark.parametrize("ended", [False, True], ids=["a child", "a child of one that has ended"])
def test_a_process_that_a_test_leaves_behind_is_killed_and_fails_it(ended, monkeypatch) -> None:
    known = processes.children()
    if ended:
        done = subprocess.run([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, check=True, timeout=PATIENCE)
        left = int(done.stdout)
    else:
        child = subprocess.Popen(["sleep", "100"])
        left = child.pid
    monkeypatch.setattr(processes, "GRACE", 0.05)
    with pytest.raises(pytest.fail.Exception, match=f"{left}: sleep 100"):
        processes.end_all_but(known)
    if not ended:
        child.wait(timeout=PATIENCE)
    else:
        os.waitpid(left, 0)
    processes.end_all_but(known)


@pytest.mark.slow
def test_what_a_forked_program_leaves_behind_is_killed_and_fails_it(torch_forks, tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import subprocess\nsubprocess.Popen(['sleep', '100'], stdout=subprocess.DEVNULL)\n")
    with pytest.raises(AssertionError, match=r"left processes behind.*sleep 100"):
        torch_forks.run([str(program)], os.environ, grace=0.05)


def test_a_process_that_ends_soon_is_waited_for() -> None:
    known = processes.children()
    with subprocess.Popen(["sleep", "0.2"]):
        began = time.monotonic()
        processes.end_all_but(known)
        assert time.monotonic() - began < processes.GRACE


def test_every_command_that_a_test_runs_has_a_time_limit() -> None:
    names = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")}
    without = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        text = path.read_text()
        nodes = ast.walk(ast.parse(text)) if "subprocess." in text else ()
        calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        runs = [call for call in calls if ast.unparse(call.func) in names]
        # A constant's name: a number of its own is sooner or later too small for a slow machine.
        limited = [call for call in runs if any(_is_limit(keyword) for keyword in call.keywords)]
        without += [f"{path.name}:{call.lineno}" for call in runs if call not in limited]
    assert without == []


def _is_limit(keyword: ast.keyword) -> bool:
    return keyword.arg == "timeout" and not isinstance(keyword.value, ast.Constant)
