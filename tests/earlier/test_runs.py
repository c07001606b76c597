"""Runs that version 0.2.0 wrote, finished and stopped after 3 of 4 steps, are continued to the same numbers."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytestmark = pytest.mark.usefixtures("short_runs")

OPTIONS = "--valid 0.25 --model tiny_models:tiny --epochs 2 --batch-size 4 --lr 0.05 --resume"
CLASSES = "--flip --ema 0.9"
NUMBERS = "--optimizer adamw"
KINDS = [("", CLASSES), ("numbers-", NUMBERS)]


class Runs(NamedTuple):
    """Where the runs of a kind are."""

    cache: Path
    finished: Path
    stopped: Path
    predictions: Path


@pytest.fixture
def runs(unpacked: Callable[[str], Path]) -> Callable[[str], Runs]:
    """Return the runs of a kind; they are not to be written to."""

    def of(kind: str) -> Runs:
        folder, cache = unpacked("0.2.0"), "numbers" if kind else "twelve"
        names = (f"{kind}finished", f"{kind}stopped", f"{kind}predictions.csv")
        return Runs(folder / cache, *(folder / name for name in names))

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_a_stopped_run_is_continued_to_the_finished_one(
    runs: Callable[[str], Runs], tmp_path: Path, command: Callable[..., None], kind: str, more: str
) -> None:
    found, run = runs(kind), tmp_path / "run"
    shutil.copytree(found.stopped, run)
    command("train", found.cache, "--run", run, *OPTIONS.split(), *more.split())
    losses, expected = (json.loads((each / "report.json").read_text())["losses"] for each in (run, found.finished))
    assert len(losses) == 4
    assert losses == pytest.approx(expected, abs=1e-5)
    assert numbers_of(run / "history.csv") == pytest.approx(numbers_of(found.finished / "history.csv"), abs=1e-5)
    out = tmp_path / "predictions.csv"
    command("predict", run, found.cache, "-o", out, "--trust", "tiny_models:tiny")
    assert numbers_of(out) == pytest.approx(numbers_of(found.predictions), abs=1e-4)


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_the_best_weights_of_a_run_predict_the_same(
    runs: Callable[[str], Runs], tmp_path: Path, command: Callable[..., None], kind: str, more: str
) -> None:
    found, out = runs(kind), tmp_path / "predictions.csv"
    command("predict", found.finished, found.cache, "-o", out, "--trust", "tiny_models:tiny")
    assert numbers_of(out) == pytest.approx(numbers_of(found.predictions), abs=1e-4)


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_a_finished_run_is_left_as_it_is(
    runs: Callable[[str], Runs], tmp_path: Path, command: Callable[..., None], kind: str, more: str
) -> None:
    found, run = runs(kind), tmp_path / "run"
    shutil.copytree(found.finished, run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    command("train", found.cache, "--run", run, *OPTIONS.split(), *more.split())
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_other_settings_are_refused(
    runs: Callable[[str], Runs],
    tmp_path: Path,
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = runs("")
    shutil.copytree(found.stopped, tmp_path / "run")
    options = [*OPTIONS.split(), *CLASSES.split(), "--precision", "bf16"]
    with pytest.raises(AssertionError):
        command("train", found.cache, "--run", tmp_path / "run", *options)
    assert "precision float32, now bf16" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "predict"])
def test_a_run_of_before_the_first_release_is_refused_with_a_remedy(
    runs: Callable[[str], Runs],
    tmp_path: Path,
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    found, run = runs(""), tmp_path / "run"
    shutil.copytree(found.stopped, run)
    for file in ("last.pt", "best.pt"):
        content = torch.load(run / file, weights_only=True)
        content["settings"]["warmup"] = content["settings"].pop("ramp")
        del content["settings"]["precision"], content["digests"]
        torch.save(content, run / file)
    arguments = {
        "train": ("train", found.cache, "--run", run, *OPTIONS.split(), *CLASSES.split()),
        "predict": ("predict", run, found.cache, "-o", tmp_path / "out.csv", "--trust", "tiny_models:tiny"),
    }
    with pytest.raises(AssertionError):
        command(*arguments[name])
    assert "was written before version 0.2 of tpucache: use the run with version 0.2" in capsys.readouterr().err


def numbers_of(table: Path) -> list[float]:
    """Return all numbers of a CSV file, row by row."""
    with table.open() as file:
        rows: list[list[Any]] = list(csv.reader(file))
    return [float(cell) for row in rows[1:] for cell in row if re.fullmatch(r"[-+.e\d]+", cell)]
