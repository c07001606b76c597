"""Workers, which joblib keeps from one run to the next, work where each run was started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tpucache import Recipe, build_cache
from tpucache.warmup.running.executor import Executor

Digests = Callable[[Path], dict[str, str]]


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


def test_relative_paths_mean_the_same_in_a_later_run_elsewhere(
    tmp_path: Path, write_photos: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, digests: Digests
) -> None:
    for name in ("first", "second"):
        write_photos(tmp_path / name / "photos", 80, size=(40, 30))
        monkeypatch.chdir(tmp_path / name)
        build_cache(Path("photos"), Path("cache"), Recipe(size=8), jobs=2)
        build_cache(Path("photos"), Path("alone"), Recipe(size=8), jobs=1)
        assert digests(Path("cache")) == digests(Path("alone"))
