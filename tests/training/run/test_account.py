"""The parts of a run's time add up to all of it, over all processes that took part."""

from __future__ import annotations

import dataclasses

import pytest
from running import report_of
from stopping import stop_once

from tpucache.training.device import CpuDevice
from tpucache.training.pace import PARTS, Account
from tpucache.training.run.report import ensure_report, read_account, read_report


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
        report = report_of(tmp_path)
        assert report["wall_seconds"] == report["seconds"]["start_up"] == expected
