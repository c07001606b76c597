"""Runs of the command line in processes of their own, because XLA is set up once a process."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from patience import PATIENCE

Run = subprocess.CompletedProcess[str]
HERE = Path(__file__).parent
sys.path.append(str(HERE))  # for names such as tiny_models:tiny, here as in the processes below


@pytest.fixture(scope="session")
def python(xla_forks: Any, xla_flags: str) -> Callable[..., Run]:
    """Run Python with these arguments on XLA's CPU client with this many devices; unless `asked`, it has to be found.

    Keywords are added to its environment.
    """
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*arguments: object, devices: int = 1, asked: bool = True, cwd: Path | None = None, **more: str) -> Run:
        words = [str(argument) for argument in arguments]
        environment = {
            **os.environ,
            "XLA_FLAGS": xla_flags,
            "CPU_NUM_DEVICES": str(devices),
            "PYTHONPATH": path,
            **more,
        }
        if asked:
            done: Run = xla_forks.run(words, {**environment, "PJRT_DEVICE": "CPU"}, cwd=cwd)
            return done
        environment.pop("PJRT_DEVICE", None)
        # Importing torch_xla sets PJRT_DEVICE, so that a fork of what has imported it would not be without.
        command = [sys.executable, *words]
        return subprocess.run(
            command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=PATIENCE
        )

    return run


@pytest.fixture
def on_xla(python: Callable[..., Run], tmp_path: Path) -> Callable[..., str]:
    """The function `on_xla(code, *arguments, devices=1)`: what a program prints there."""

    def run(code: str, *arguments: object, devices: int = 1) -> str:
        (tmp_path / "program.py").write_text(code)
        done = python(tmp_path / "program.py", *arguments, devices=devices)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session", autouse=True)
def all_runs_are_short(short_runs: None) -> None:
    """Of this process; the programs that `python` runs take care of themselves."""


@pytest.fixture(scope="session")
def sklearn_metrics() -> ModuleType:
    """scikit-learn's metrics, whose import takes seconds: by the processes alone that compare with them."""
    return importlib.import_module("sklearn.metrics")
