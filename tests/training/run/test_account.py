"""The parts of a run's time add up to all of it, over all processes that took part."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
from stopping import stop_once
from thorough import thorough

from tpucache.training.device import CpuDevice
from tpucache.training.pace import PARTS, Account
from tpucache.training.run.report import ensure_report, read_account, read_report

COMMAND = """
import atexit, gc, sys, time

began = time.monotonic()
atexit.register(lambda: print("frozen", gc.get_freeze_count()))
time.sleep(0.5)  # what a process imports before the command begins
from tpucache.__main__ import run_command
from tpucache.training.commands import train as training
from tpucache.training import loop

training.seconds = float  # parts of a second for --time-limit, too
loop.ceiling = lambda *_: 1.0  # the replay would take hundreds of steps
status = run_command()
print("seconds", time.monotonic() - began)
sys.exit(status)
"""


@pytest.mark.slow
def test_the_parts_of_a_run_that_was_stopped_and_killed_add_up_to_its_time(cache, tmp_path):
    walls = []
    for kind, moment in (("time limit", 3), ("SIGKILL", 7), ("none", 0)):
        before = read_account(tmp_path)[1]
        assert stop_once(cache, tmp_path, CpuDevice(), kind, moment) == (kind != "none")
        assert (tmp_path / "account.json").exists() == (kind == "SIGKILL")
        seconds, wall = read_account(tmp_path)
        assert {*seconds} == {*PARTS}
        assert sum(seconds.values()) == pytest.approx(wall, rel=0.02)
        assert wall > before
        walls.append(wall)
    report = read_report(tmp_path)
    assert report is not None
    assert report.finished
    assert report.wall_seconds == walls[-1]
    assert min(report.seconds[name] for name in ("start_up", "steps", "evaluation", "metrics", "checkpoints")) > 0
    shown = dataclasses.replace(report, seconds={"steps": 60.0, "start_up": 2.5, "metrics": 0.01}, wall_seconds=62.51)
    assert "time       62.5 s: steps 60.0, start up 2.5" in shown.lines()


def test_a_run_that_is_stopped_before_its_first_step_has_an_account(tmp_path):
    for expected in (2.0, 4.0):
        account = Account(0.0, lambda: 2.0)
        with account.part("staging"):
            pass
        ensure_report(tmp_path, "eager", 1, account)
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["wall_seconds"] == report["seconds"]["start_up"] == expected


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["eager", *thorough(pytest.param("xla", marks=pytest.mark.xla))])
def test_the_parts_add_up_to_the_time_of_three_processes_by_another_clock(cache, python, tmp_path, backend):
    (tmp_path / "command.py").write_text(COMMAND)
    words = ["train", cache, "--run", tmp_path / "run", "--backend", backend, "--model", "tiny_models:Sleeper"]
    words += ["--valid", "0.2", "--epochs", "6", "--batch-size", "16", "--resume"]
    inside, began = 0.0, time.monotonic()
    for limit in (0.3, 0.3, 3600):
        done = python(tmp_path / "command.py", *words, "--time-limit", limit)
        assert done.returncode == (3 if limit < 1 else 0), done.stderr
        seconds, frozen = (float(line.split()[1]) for line in done.stdout.splitlines()[-2:])
        inside += seconds
        # Then the end of Python takes 0.4 s of a processor, and not several seconds, which nothing could count.
        assert frozen > 100_000
    outside = time.monotonic() - began
    spent, wall = read_account(tmp_path / "run")
    assert sum(spent.values()) == pytest.approx(wall, rel=0.001)
    # The bounds are wide, because other tests run at the same time.
    assert 0.9 * inside - 0.5 <= wall <= outside
