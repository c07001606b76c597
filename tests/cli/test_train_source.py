"""train SOURCE --cache DIR: the first epoch builds the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpucache import CachedDataset, Recipe, build_cache
from tpucache.cli import main


@pytest.mark.slow
def test_a_run_on_a_source_leaves_the_cache_of_warmup(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tpucache_tests_linear.py").write_text(
        "from torch import nn\n\ndef linear(outputs):\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, outputs))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    cache, run = tmp_path / "cache", tmp_path / "run"
    command = ["train", str(photos), "--cache", str(cache), "--run", str(run), "--size", "16", "--valid", "0.2"]
    status = main(
        [*command, "--model", "tpucache_tests_linear:linear", "--epochs", "1", "--backend", "eager", "--json"]
    )
    out, err = capsys.readouterr()
    assert status == 0
    assert f"the cache is finished: {cache}" in err
    assert json.loads(out)["epochs"][0]["epoch"] == 1
    build_cache(photos, tmp_path / "expected", Recipe(size=16), jobs=1)
    names = ("manifest.json", "index.npy", "samples.npz", "v00-00000.lmdb")
    assert all((cache / name).read_bytes() == (tmp_path / "expected" / name).read_bytes() for name in names)
    assert json.loads((run / "run.json").read_text())["training"]["samples"] == 120
    assert len(CachedDataset(cache)) == 150


@pytest.mark.parametrize("given", [["--folds"], ["--lr", "find"], ["--stage", "copies"]])
def test_what_needs_a_finished_cache_is_refused(
    given: list[str], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(photos), "--cache", str(tmp_path / "cache"), "--run", str(tmp_path / "run"), *given]
    assert main([*command, "--backend", "eager"]) == 2
    assert "finished cache" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
