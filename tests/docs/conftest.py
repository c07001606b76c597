"""What the pages show is run as shown, with a shorter measurement."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tpucache.report.bench import run_bench

sys.path.append(str(Path(__file__).parent))  # for layouts


@pytest.fixture(autouse=True)
def short_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `bench` measure for a moment: that it answers is tested, not what."""
    for name, value in (("rounds", 1), ("seconds", 0.05)):
        monkeypatch.setitem(run_bench.__kwdefaults__, name, value)
