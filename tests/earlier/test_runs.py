"""Runs that two earlier commits wrote are continued and used for prediction, with the same numbers.

`data` itself has those of e3a34f9: finished, and stopped after 3 of 4 steps, on a cache of 12 images of noise.
"""

from __future__ import annotations

import csv
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytestmark = pytest.mark.usefixtures("short_runs")

DATA = Path(__file__).parent / "data"
OPTIONS = "--valid 0.25 --model tiny_models:tiny --epochs 2 --batch-size 4 --lr 0.05 --resume"
CLASSES = "--flip --ema 0.9"
NUMBERS = "--optimizer adamw"
KINDS = [("e3a34f9", "", CLASSES), ("8782811", "", CLASSES), ("8782811", "numbers-", NUMBERS)]


class Runs(NamedTuple):
    """Where a commit's runs of a kind are."""

    cache: Path
    finished: Path
    stopped: Path
    predictions: Path


@pytest.fixture
def runs(unpacked: Callable[[str], Path]) -> Callable[[str, str], Runs]:
    """Return the runs of a commit and kind; they are not to be written to."""

    def of(commit: str, kind: str) -> Runs:
        folder = DATA if commit == "e3a34f9" else unpacked(commit)
        cache = "cache" if commit == "e3a34f9" else "numbers" if kind else "twelve"
        names = (f"{kind}finished", f"{kind}stopped", f"{kind}predictions.csv")
        return Runs(folder / cache, *(folder / name for name in names))

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("commit", "kind", "more"), KINDS)
def test_a_stopped_run_is_continued_to_the_finished_one(
    runs: Callable[[str, str], Runs], tmp_path: Path, command: Callable[..., None], commit: str, kind: str, more: str
) -> None:
    found, run = runs(commit, kind), tmp_path / "run"
    shutil.copytree(found.stopped, run)
    command("train", found.cache, "--run", run, *OPTIONS.split(), *more.split())
    losses, expected = (json.loads((each / "report.json").read_text())["losses"] for each in (run, found.finished))
    assert len(losses) == 4
    assert losses == pytest.approx(expected, abs=1e-5)
    assert numbers_of(run / "history.csv") == pytest.approx(numbers_of(found.finished / "history.csv"), abs=1e-5)
    out = tmp_path / "predictions.csv"
    command("predict", run, found.cache, "-o", out, "--trust", "tiny_models:tiny")
    assert numbers_of(out) == pytest.approx(numbers_of(found.predictions), abs=1e-4)


@pytest.mark.parametrize(("commit", "kind", "more"), KINDS)
def test_the_best_weights_of_a_run_predict_the_same(
    runs: Callable[[str, str], Runs], tmp_path: Path, command: Callable[..., None], commit: str, kind: str, more: str
) -> None:
    found, out = runs(commit, kind), tmp_path / "predictions.csv"
    command("predict", found.finished, found.cache, "-o", out, "--trust", "tiny_models:tiny")
    assert numbers_of(out) == pytest.approx(numbers_of(found.predictions), abs=1e-4)


@pytest.mark.parametrize(("commit", "kind", "more"), KINDS)
def test_a_finished_run_is_left_as_it_is(
    runs: Callable[[str, str], Runs], tmp_path: Path, command: Callable[..., None], commit: str, kind: str, more: str
) -> None:
    found, run = runs(commit, kind), tmp_path / "run"
    shutil.copytree(found.finished, run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    command("train", found.cache, "--run", run, *OPTIONS.split(), *more.split())
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


@pytest.mark.parametrize("commit", ["e3a34f9", "8782811"])
def test_other_settings_are_refused(
    runs: Callable[[str, str], Runs],
    tmp_path: Path,
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    commit: str,
) -> None:
    found = runs(commit, "")
    shutil.copytree(found.stopped, tmp_path / "run")
    options = [*OPTIONS.split(), *CLASSES.split(), "--precision", "bf16"]
    with pytest.raises(AssertionError):
        command("train", found.cache, "--run", tmp_path / "run", *options)
    assert "precision float32, now bf16" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_without_digests_is_continued_with_a_warning(
    runs: Callable[[str, str], Runs], tmp_path: Path, command: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    found = runs("e3a34f9", "")
    shutil.copytree(found.stopped, tmp_path / "run")
    last = torch.load(tmp_path / "run/last.pt", weights_only=True)
    last["stand"]["best"] = float("nan")
    torch.save(last, tmp_path / "run/last.pt")
    with caplog.at_level(logging.WARNING, "tpucache"):
        command("train", found.cache, "--run", tmp_path / "run", *OPTIONS.split(), *CLASSES.split())
    assert "did not record the selection of samples" in caplog.text
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["best_epoch"] == 2  # NaN is worse than every number


def numbers_of(table: Path) -> list[float]:
    """Return all numbers of a CSV file, row by row."""
    with table.open() as file:
        rows: list[list[Any]] = list(csv.reader(file))
    return [float(cell) for row in rows[1:] for cell in row if re.fullmatch(r"[-+.e\d]+", cell)]
