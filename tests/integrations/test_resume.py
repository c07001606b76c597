"""`resuming.py` passes in a process of its own: Lightning and accelerate import torch_xla where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_a_run_resumes_inside_an_epoch(library, needs, tmp_path):
    needs(library)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'own'}"),
            *(HERE / "resuming.py", "-k", library),
        ],
        env={**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("."), done.stdout  # it was not skipped
