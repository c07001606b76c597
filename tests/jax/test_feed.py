"""`feeding.py` and `resident.py` pass, each in a process of its own: JAX's threads would make every later fork warn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from once import once
from resident_orders import make_caches

# Not imported here: in a process with JAX, every later fork warns.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")]


@pytest.mark.parametrize(("program", "devices"), [("feeding.py", 4), ("resident.py", 8)])
def test_batches_for_jax_are_right(program, devices, run_with_jax, pytestconfig, tmp_path, tmp_path_factory):
    caches = once(tmp_path_factory, "resident-orders", make_caches) if program == "resident.py" else ""
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path}",
        Path(__file__).with_name(program),
    ]
    if "not thorough" in pytestconfig.option.markexpr:
        words += ["-m", "not thorough"]
    done = run_with_jax(*words, devices=devices, RESIDENT_CACHES=caches)
    assert done.returncode == 0, done.stdout + done.stderr
