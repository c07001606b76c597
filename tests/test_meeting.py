"""Tests that XLA's limit of ten seconds has ended are tried again, and others are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from meeting import DID_NOT_MEET, TRIES
from patience import PATIENCE

TESTS = f"""
import pytest
pytestmark = pytest.mark.xla
tries = []

@pytest.fixture
def tried(request):
    tries.append(request.function.__name__)
    return tries.count(request.function.__name__)

def test_meets_at_last(tried):
    assert tried == 2, "{DID_NOT_MEET} `all gather`"

def test_never_meets(tried):
    assert not tried, "{DID_NOT_MEET} `all gather`"

def test_fails_for_another_reason(tried):
    assert not tried, "another reason"

def test_what_was_tried():
    names = ["meets_at_last"] * 2 + ["never_meets"] * {TRIES} + ["fails_for_another_reason"]
    assert tries == [f"test_{{name}}" for name in names]
"""


@pytest.mark.slow
def test_a_test_whose_threads_did_not_meet_in_time_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = xla\n")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "meeting", "-p", "no:cacheprovider", "test_it.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.stdout.splitlines()[-1].startswith("2 failed, 2 passed"), done.stdout
