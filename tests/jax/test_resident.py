"""`resident.py` passes in a process of its own: JAX's threads would make every later fork of this one warn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from once import once
from resident_orders import make_caches

# Not imported here: in a process with JAX, every later fork warns.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")]


def test_records_that_stay_on_eight_devices_of_jax_are_right(run_with_jax, pytestconfig, tmp_path, tmp_path_factory):
    caches = once(tmp_path_factory, "resident-orders", make_caches)
    program = Path(__file__).with_name("resident.py")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}", program]
    if "not thorough" in pytestconfig.option.markexpr:
        words += ["-m", "not thorough"]
    done = run_with_jax(*words, devices=8, RESIDENT_CACHES=caches)
    assert done.returncode == 0, done.stdout + done.stderr
