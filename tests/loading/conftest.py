"""Caches lie on the disk here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from disk import cache, tmp_path, tmp_path_factory

__all__ = ["cache", "tmp_path", "tmp_path_factory"]


@pytest.fixture
def copy(cache: Path, tmp_path: Path) -> Path:
    """A cache of the test's own."""
    return Path(shutil.copytree(cache, tmp_path / "copy"))
