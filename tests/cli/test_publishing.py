"""publish, push and fetch, as a user types them."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tpucache import CachedDataset, verify_cache
from tpucache.cli import main

WORDS = ["--id", "ann/noise-at-16", "--title", "Noise at 16", "--license", "CC0-1.0"]


@pytest.fixture
def stored(cache, tmp_path):
    """A copy of the session's cache, in a folder where other folders may be made."""
    return Path(shutil.copytree(cache, tmp_path / "stored"))


@pytest.fixture(autouse=True)
def _without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "kagglesdk", None)


@pytest.mark.slow
def test_a_dry_run_makes_the_folder_and_tells_what_would_go_out(stored, capsys):
    assert main(["publish", str(stored), *WORDS, "--dry-run"]) == 0
    out = capsys.readouterr().out
    folder = stored.with_name("stored.publish")
    assert len(CachedDataset(folder)) == 150
    files = [path for path in folder.iterdir() if path.name != "dataset-metadata.json"]
    assert all(f"{path.stat().st_size:,}  {path.name}\n" in out for path in files)
    assert f"{sum(path.stat().st_size for path in files):,}  bytes in {len(files)} files, for ann/noise-at-16" in out
    assert f"command  kaggle datasets create -p {shlex.quote(str(folder))}\n" in out
    assert "this was a dry run" in out


@pytest.mark.slow
def test_without_kaggles_library_the_command_is_printed(stored, tmp_path, capsys):
    assert main(["publish", str(stored), *WORDS, "--public", "--out", str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["command"] == shlex.join(["kaggle", "datasets", "create", "-p", str(tmp_path / "out"), "--public"])
    assert report["uploaded"] is False
    assert report["bytes"] == sum(report["files"].values())
    assert "README.md" in report["files"]
    assert main(["publish", str(stored), *WORDS]) == 0
    assert "kagglesdk is not installed here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (WORDS[:4], "--license is one of CC0-1.0, "),
        (["--id", "ann/No", *WORDS[2:]], "--id is owner/slug"),
        (WORDS[2:], "--id"),
    ],
)
def test_what_kaggle_would_refuse_is_a_usage_error(stored, words, message, capsys):
    try:
        status = main(["publish", str(stored), *words])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not stored.with_name("stored.publish").exists()


@pytest.mark.slow
def test_push_and_fetch_tell_what_went_and_came(cache, tmp_path, capsys):
    assert main(["push", str(cache), f"file://{tmp_path}/there"]) == 0
    out, err = capsys.readouterr()
    assert "600 records" in out
    assert "push: " in err
    assert main(["fetch", f"{tmp_path}/there", str(tmp_path / "here"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 600
    assert verify_cache(tmp_path / "here") == []
    assert main(["fetch", f"{tmp_path}/gone", str(tmp_path / "x")]) == 1
    assert "gone holds no manifest.json" in capsys.readouterr().err
    assert main(["push", str(cache), "https://example.org/x"]) == 2
