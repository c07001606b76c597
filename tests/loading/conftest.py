"""Caches lie on the disk here."""

from __future__ import annotations

import pytest
from disk import cache, tmp_path, tmp_path_factory

from tpucache.loading.reading import leases

__all__ = ["cache", "no_leases", "tmp_path", "tmp_path_factory"]


@pytest.fixture
def no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives no read leases, as macOS does, and many file systems of a network."""
    monkeypatch.setattr(leases, "_has_leases", lambda: False)
