"""Workers, which joblib keeps from one run to the next, work where each run was started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tpucache.warmup.running import executor
from tpucache.warmup.running.executor import Executor


def place() -> tuple[int, str, list[str]]:
    return os.getpid(), str(Path.cwd()), sys.path


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


def test_few_tasks_run_here_as_long_as_workers_would_take_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_ALONE_SECONDS", 60)
    assert {process for process, _, _ in Executor(jobs=2).run(((place, ()) for _ in range(8)), few=True)} == {
        os.getpid()
    }


def test_workers_take_over_few_tasks_that_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_ALONE_SECONDS", 0)
    first, *others = Executor(jobs=2).run(((place, ()) for _ in range(8)), few=True)
    assert first[0] == os.getpid()
    assert len(others) == 7
    assert os.getpid() not in {process for process, _, _ in others}
