"""Caches lie on the disk here."""

from __future__ import annotations

from disk import cache, tmp_path, tmp_path_factory

__all__ = ["cache", "tmp_path", "tmp_path_factory"]
