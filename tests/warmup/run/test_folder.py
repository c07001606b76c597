"""A cache is made in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpucache.errors import UsageError
from tpucache.store.format import MANIFEST_NAME, WORK_NAME
from tpucache.warmup.run.folder import check_source


def test_a_cache_may_be_neither_its_source_nor_inside_it_nor_around_it(tmp_path: Path) -> None:
    source = tmp_path / "photos"
    source.mkdir()
    for cache in (source, source / "cache", tmp_path):
        with pytest.raises(UsageError, match="give another folder for the cache"):
            check_source(source, cache)
    check_source(source, tmp_path / "cache")


def test_a_source_that_is_no_folder_may_be_named_anywhere(tmp_path: Path) -> None:
    (tmp_path / "photos.csv").touch()
    check_source(tmp_path / "photos.csv", tmp_path)
    check_source("module:name", Path.cwd())


@pytest.mark.parametrize("name", [MANIFEST_NAME, WORK_NAME])
def test_a_cache_that_was_begun_inside_its_source_may_be_finished(tmp_path: Path, name: str) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name).touch()
    check_source(tmp_path, tmp_path / "cache")
