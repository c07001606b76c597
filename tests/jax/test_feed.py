"""`feeding.py` passes in a process of its own: JAX's threads would make every later fork of this one warn."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jax")
pytestmark = pytest.mark.slow


def test_batches_for_jax_are_right(start, tmp_path):
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path}",
        Path(__file__).with_name("feeding.py"),
    ]
    run = start(*words, devices=4)
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
