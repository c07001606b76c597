"""Runs of the command line in processes of their own, because XLA is set up once a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = subprocess.CompletedProcess[str]
HERE = Path(__file__).parent
sys.path.append(str(HERE))  # for names such as tiny_models:tiny, here as in the processes below


@pytest.fixture(scope="session")
def python() -> Callable[..., Run]:
    """Run Python with these arguments on XLA's CPU client of so many devices; not `asked`, it has to be found."""

    def run(*arguments: str | Path, devices: int = 1, asked: bool = True) -> Run:
        environment = {
            **os.environ,
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(devices),
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        if not asked:
            del environment["PJRT_DEVICE"]
        return subprocess.run(
            [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False
        )

    return run
