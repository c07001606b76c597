"""Photographs in torchvision's layout, and a place for their caches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for writing.py

from writing import write_picture


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where caches are kept unless a test says otherwise."""
    monkeypatch.setenv("TPUCACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept" / "datasets"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six pictures of three classes, whose order is that of texts: 10, 9, cat."""
    for number, name in enumerate(("9/b.png", "9/a.png", "10/a.png", "10/c.png", "cat/x.png", "cat/y.png")):
        write_picture(tmp_path / "photos" / name, number)
    return tmp_path / "photos"
