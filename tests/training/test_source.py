"""train SOURCE: the first epoch builds the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpucache import CachedDataset, Recipe, build_cache
from tpucache.cli import main
from tpucache.errors import UsageError
from tpucache.store.manifest import Manifest
from tpucache.training.pace import Pace
from tpucache.training.run.report import TrainReport
from tpucache.training.source import SourceArguments, is_source

QUICK = ["--model", "tiny_models:tiny", "--epochs", "1", "--backend", "eager"]


@pytest.mark.slow
def test_a_run_on_a_source_leaves_the_cache_of_warmup_next_to_it(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "first"
    command = ["train", str(photos), "--run", str(run), "--valid", "0.2", "--build", "--size 16 --codec png"]
    assert main([*command, *QUICK, "--json"]) == 0
    out, err = capsys.readouterr()
    (cache,) = (tmp_path / "runs").glob("cache-*")
    assert (
        err.splitlines()[0] == f"tpucache: {photos} is a source: its cache is {cache}, which is built while it is read"
    )
    report = json.loads(out)
    built = report["pace"]["built"]
    assert (built["cache"], built["epochs"]) == (str(cache), 1)
    assert built["bytes"] == Manifest.load(cache).total_bytes
    build_cache(photos, tmp_path / "expected", Recipe(size=16, codec="png"), jobs=1)
    names = ("manifest.json", "index.npy", "samples.npz", "v00-00000.lmdb")
    assert all((cache / name).read_bytes() == (tmp_path / "expected" / name).read_bytes() for name in names)
    assert json.loads((run / "run.json").read_text())["training"]["samples"] == 120
    assert len(CachedDataset(cache)) == 150
    # All else that trains finds it again.
    assert main([*command[:3], str(tmp_path / "runs" / "second"), *command[4:], *QUICK]) == 0
    out, err = capsys.readouterr()
    assert f"{cache} is finished: 150 samples" in err
    assert "built the cache" not in out


def test_where_several_runs_begin_at_once_all_is_built_first(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    lines = [f"{path.relative_to(photos)},{number % 2}" for number, path in enumerate(sorted(photos.rglob("*.png")))]
    table.write_text("\n".join(["path,fold", *lines[:40]]) + "\n")
    source, cache, run = str(table), tmp_path / "cache", tmp_path / "run"
    command = ["train", source, "--cache", str(cache), "--run", str(run), "--folds", "--size", "16"]
    options = f"--root {photos} --fold-col fold --label-col fold"
    assert main([*command, "--build", options, *QUICK, "--batch-size", "8"]) == 0
    assert "begin when the whole cache is built" in capsys.readouterr().err
    assert len(CachedDataset(cache)) == 40
    assert sorted(path.name for path in run.glob("fold-*")) == ["fold-0", "fold-1"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--cache-dir", "copies"], "--cache-dir is for a cache at a URL"),
        (
            ["--build", "--dry-run"],
            "--build: there is no option --dry-run. It takes the options of `tpucache warmup --help-all`",
        ),
        (["--build", "--codec jpg"], "did you mean jpeg?"),
        (["--build", "--backend dask"], "no option --backend"),
    ],
)
def test_what_is_not_accepted_is_refused_with_the_way(
    given: list[str], said: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(photos), "--run", str(tmp_path / "run"), *given]
    assert main([*command, "--backend", "eager"]) == 2
    assert said in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("given", [["--cache", "DIR"], ["--build", "--codec png"]])
def test_a_cache_needs_none(given: list[str], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_cache(photos, tmp_path / "cache", Recipe(size=16), jobs=1)
    assert main(["train", str(tmp_path / "cache"), "--run", str(tmp_path / "run"), *given, "--backend", "eager"]) == 2
    assert f"{given[0]} is for a source" in capsys.readouterr().err


def test_a_settings_file_names_no_code_for_the_cache(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text('build = "--variants 1 --augment tpucache_tests_evil:change"\n')
    with pytest.raises(SystemExit):
        main(["train", str(photos), "--run", str(tmp_path / "run"), "--config", str(tmp_path / "run.toml")])
    assert "names code, which a file may not do" in capsys.readouterr().err


def test_what_is_a_source(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "v00-00000.lmdb").write_bytes(b"")
    (tmp_path / "table.csv").write_text("path,label\n")
    found = [photos, tmp_path / "table.csv", Path("module:function"), Path("photos/*.tfrec")]
    assert all(map(is_source, found))
    others: list[Any] = [tmp_path / "empty", tmp_path / "cut", tmp_path / "missing", "gs://bucket/cache"]
    assert not any(map(is_source, others))


def test_the_place_of_a_cache_follows_from_the_source_and_what_is_in_it(tmp_path: Path) -> None:
    source = tmp_path / "photos"

    def place(text: str, size: int | None = None, of: Path = source) -> Path:
        return SourceArguments(of, text, size).default_cache(tmp_path)

    assert place("--size 64") == place("", 64) == place("--size 64 --jobs 3")
    assert len({place(""), place("--size 64"), place("--limit 5"), place("", of=tmp_path / "b" / "photos")}) == 4
    assert place("--size 64", 32) == place("--size 64")  # what --build says counts
    with pytest.raises(UsageError, match="warmup --help-all"):
        place("--sizes 64")


def test_the_report_says_what_building_cost() -> None:
    rows = [{"epoch": epoch} for epoch in range(1, 13)]
    built: dict[str, Any] = {"cache": "kept", "bytes": 1_200_000_000, "epochs": 1, "waited": 0.83, "later": 0.001}
    report = TrainReport("eager", 1, [], rows, Pace(0, 0.0, 0.0, 0.0, 0.0, 0, 0, built=built), 0, None)
    (line,) = [line for line in report.lines(epochs=False) if line.startswith("cache")]
    expected = "cache      epoch 1 built the cache: waited 83%; epochs 2 to 12: 0.1%; the cache is in kept, 1.2 GB"
    assert line == expected
