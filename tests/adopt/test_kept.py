"""The command `cached` lists and removes the caches of data sets, but none in use, and nothing that is not a cache."""

from __future__ import annotations

import gc
import json
import os
import pwd
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpucache import ImageFolder, UsageError
from tpucache.adopt.kept import list_folders
from tpucache.cli import main
from tpucache.store.lock import hold


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["cached", "--json", *words]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["datasets"]
    return found


def test_a_cache_of_a_data_set_is_listed_and_removed_unless_it_is_in_use(
    root: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = ImageFolder(root, size=8, jobs=1)
    (found,) = listed(capsys)
    assert (found["name"], found["directory"], found["is_finished"]) == ("photos", str(dataset.directory), True)
    assert found["bytes"] > 0
    assert main(["cached", "--clear", "photos"]) == 1
    assert "is in use" in capsys.readouterr().err
    assert dataset.directory.exists()
    del dataset
    gc.collect()
    assert main(["cached", "--clear", "birds"]) == 2
    assert listed(capsys, "--clear", "photos") == [found]
    assert listed(capsys) == []
    assert list(kept.iterdir()) == []
    assert len(ImageFolder(root, size=8, jobs=1)) == 6


def test_the_folder_of_cache_is_given_as_cache_dir(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ImageFolder(root, size=8, jobs=1, cache=tmp_path / "mine")
    gc.collect()
    assert listed(capsys) == []
    (found,) = listed(capsys, "--cache-dir", str(tmp_path / "mine"))
    assert listed(capsys, "--cache-dir", str(tmp_path / "mine"), "--clear", found["directory"]) == [found]
    assert not Path(found["directory"]).exists()


def test_a_cache_that_a_process_builds_is_not_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = ImageFolder(root, size=8, jobs=1).directory
    gc.collect()
    (directory / ".warmup").mkdir()
    with hold(directory / ".warmup" / "lock", AssertionError):
        assert main(["cached", "--clear", "all"]) == 1
    assert "is in use" in capsys.readouterr().err
    assert directory.exists()


def unfinished(directory: Path) -> Path:
    (directory / "manifest.json").unlink()
    (directory / ".warmup").mkdir()
    return directory


def without_manifest(directory: Path) -> Path:
    (directory / "manifest.json").unlink()
    return directory


def cut(directory: Path) -> Path:
    os.truncate(directory / "v00-00000.lmdb", 4096)
    return directory


def half_removed(directory: Path) -> Path:
    (directory / "index.npy").unlink()
    return directory.rename(directory.with_name(f".removed-{'0' * 16}"))


BROKEN: dict[str, Callable[[Path], Path]] = {
    "unfinished": unfinished,
    "without its manifest": without_manifest,
    "damaged": cut,
    "half removed": half_removed,
}


@pytest.mark.parametrize("problem", BROKEN)
def test_what_cannot_be_read_is_listed_with_its_reason_and_removed_when_asked(
    problem: str, root: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = BROKEN[problem](ImageFolder(root, size=8, jobs=1).directory)
    gc.collect()
    (found,) = listed(capsys)
    assert (found["directory"], found["is_finished"]) == (str(directory), False)
    assert found["problem"].startswith(problem)
    assert main(["cached", "--clear", "all"]) == 0
    assert f", {problem}" in capsys.readouterr().out
    assert [*kept.iterdir()] == []


@pytest.mark.parametrize("problem", [each for each in BROKEN if each != "unfinished"])
def test_what_cannot_be_read_is_removed_when_the_cache_is_built_anew(problem: str, root: Path, capsys: Any) -> None:
    before = ImageFolder(root, size=8, jobs=1).directory
    gc.collect()
    broken = BROKEN[problem](before)
    capsys.readouterr()
    assert len(ImageFolder(root, size=8, jobs=1)) == 6
    assert broken == before or not broken.exists()
    assert (f"photos: its cache was {problem}" in capsys.readouterr().err) == (broken == before)
    assert [each.problem for each in list_folders()] == [""]


def test_where_no_folder_is_known_the_user_is_told_what_to_set(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "HOME", "TPUCACHE_DIR", "XDG_CACHE_HOME":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # this user has no account
    with pytest.raises(UsageError, match="set TPUCACHE_DIR to a folder"):
        ImageFolder(root, size=8, jobs=1)


@pytest.mark.parametrize("name", ["thesis.txt", "thesis.tmp", ".thesis.tmp", ".thesis.7.tmp"])
def test_a_folder_with_files_that_are_not_of_a_cache_stays(
    name: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = ImageFolder(root, size=8, jobs=1).directory
    gc.collect()
    (directory / name).touch()
    assert main(["cached", "--clear", "all"]) == 1
    assert f"has files that are not of a cache, such as {name}" in capsys.readouterr().err
    assert (directory / "manifest.json").exists()


def test_foreign_folders_and_links_are_neither_listed_nor_removed(
    root: Path, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = ImageFolder(root, size=8, jobs=1).directory
    gc.collect()
    away = tmp_path / "away"
    shutil.copytree(directory, away)
    (directory.parent / "ab12").symlink_to(away)
    (kept / f"link-{'0' * 16}").symlink_to(directory.parent)
    for name in ("notes", f"photos-{'1' * 16}/empty", f"photos-{'1' * 16}/ab", "ab12"):
        (kept / name).mkdir(parents=True)
    assert [each.directory for each in list_folders()] == [directory]
    assert main(["cached", "--clear", "all"]) == 0
    assert (away / "manifest.json").exists()
    expected = {"ab12", f"link-{'0' * 16}", "notes", f"photos-{'1' * 16}", directory.parent.name}
    assert {path.name for path in kept.iterdir()} == expected
