"""The shared photographs, caches and run, and each test's own folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # for lab.py and refusals.py

from lab import APART, Lab, Shared, forget_modules_of
from refusals import Done


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, short_runs: None) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared").resolve()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # for lab_module
        yield Shared(folder)


@pytest.fixture
def lab(tmp_path: Path, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield Lab(tmp_path, shared)
    forget_modules_of(tmp_path)


@pytest.fixture
def apart(lab: Lab, run_with_torch: Callable[..., Any]) -> Lab:
    def run(*words: object, first: str = "") -> Done:
        done = run_with_torch(APART.format(shared=str(lab.shared.folder), first=first), *words)
        return Done(done.returncode, done.stdout, done.stderr)

    return Lab(lab.folder, lab.shared, run)
