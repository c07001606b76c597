"""Two paths to one folder are recognised, and a folder is locked by one process at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpucache import StoreError, UsageError
from tpucache.store.copying import check_no_cache_file, folder_path, hold_folder
from tpucache.store.files import check_apart


@pytest.mark.parametrize("way", ["itself", "symlink", "relative", "dots", "link above"])
def test_a_folder_is_known_as_the_cache_itself_on_every_way(tmp_path, monkeypatch, way):
    (tmp_path / "up" / "cache").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "up" / "cache")
    (tmp_path / "above").symlink_to(tmp_path / "up")
    monkeypatch.chdir(tmp_path / "up")
    target = {"itself": "cache", "symlink": "../link", "relative": "cache", "dots": "x/../cache", "link above": ""}[way]
    target = tmp_path / "above" / "cache" if way == "link above" else target
    with pytest.raises(UsageError, match="the cache itself"):
        check_apart(tmp_path / "up" / "cache", folder_path(target))


def test_neither_folder_may_be_inside_the_other(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    for target in ("cache/out", "cache/a/b", "link/out"):
        with pytest.raises(UsageError, match="inside the cache"):
            check_apart(tmp_path / "cache", tmp_path / target)
    with pytest.raises(UsageError, match="is inside"):
        check_apart(tmp_path / "cache", tmp_path)
    check_apart(tmp_path / "cache", tmp_path / "cache.publish")


def test_a_link_that_leads_to_itself_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="loop"):
        check_apart(tmp_path / "cache", tmp_path / "loop" / "out")


def test_a_place_is_a_path_or_a_file_url_and_nothing_else(tmp_path):
    assert folder_path(f"file://{tmp_path}/out") == folder_path(f"{tmp_path}/out") == folder_path(tmp_path / "out")
    assert folder_path(f"file://localhost{tmp_path}/my%20out") == tmp_path / "my out"
    for place in ("gs://bucket/out", "memory://out", "", "a\0b", Path("s3://bucket/out"), "file://host/out"):
        with pytest.raises(UsageError):
            folder_path(place)


def test_a_folder_is_held_by_one_process_at_a_time(tmp_path):
    folder = tmp_path / "a" / "b"
    again = pytest.raises(StoreError, match="another process is filling")
    with hold_folder(folder, "filling"), again, hold_folder(folder, "filling"):
        pass
    with hold_folder(folder, "filling"):
        pass


def test_a_file_of_a_cache_is_no_place_to_write_to(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(cache / "index.npy")
    for path in (*cache.iterdir(), tmp_path / "link", cache / ".." / cache.name / "manifest.json"):
        with pytest.raises(UsageError, match=r"is a file of the cache in .*: give another"):
            check_no_cache_file(path)
    for path in (cache / "sheet.png", tmp_path / "manifest.json", tmp_path / "nowhere" / "index.npy"):
        check_no_cache_file(path)
