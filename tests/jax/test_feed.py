"""`feeding.py` passes in a process of its own: JAX's threads would make every later fork of this one warn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

# Not imported here: in a process with JAX, every later fork warns.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")]


def test_batches_for_jax_are_right(run_with_jax, pytestconfig, tmp_path):
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path}",
        Path(__file__).with_name("feeding.py"),
    ]
    if "not thorough" in pytestconfig.option.markexpr:
        words += ["-m", "not thorough"]
    done = run_with_jax(*words, devices=4)
    assert done.returncode == 0, done.stdout + done.stderr
