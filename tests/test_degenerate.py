"""What one command writes, every other reads, also of data that hardly vary, or says no in one line."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from thorough import thorough

from tpucache.cli import main
from tpucache.store.manifest import Manifest
from tpucache.training.run.saved import load_best

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_runs")]

SIDE = 16
Command = Callable[..., int]


class Case(NamedTuple):
    """Pictures of each class, and how they are changed; labels, where a table has them; and options of warmup."""

    classes: tuple[str, ...] = ("ant", "bee")
    count: int = 6
    mode: str = "RGB"
    side: int = 24
    change: Callable[[np.ndarray], object] = np.copy
    labels: Mapping[str, Callable[[int], object]] = {}
    options: tuple[str, ...] = ()

    def write(self, folder: Path) -> list[object]:
        """Return the source and its options."""
        source, random = folder / "source", np.random.RandomState(7)
        for name in self.classes:
            (source / name).mkdir(parents=True)
            for number in range(self.count):
                pixels = random.randint(0, 256, (self.side, self.side, len(self.mode)), np.uint8)
                self.change(pixels)
                Image.fromarray(pixels, self.mode).save(source / name / f"{number}.png")
        (folder / "classes.txt").write_text("ant\nbee\nnobody\n")
        if not self.labels:
            return [source, *(option.format(folder=folder) for option in self.options)]
        with (source / "table.csv").open("w", newline="") as file:
            rows = ((f"{at}.png", *(label(at) for label in self.labels.values())) for at in range(self.count))
            csv.writer(file).writerows([("path", *self.labels), *rows])
        return [source / "table.csv", *(word for name in self.labels for word in ("--label-col", name))]


NUMBER = {"label": lambda _: 2.5}
CASES = {
    "no blue": Case(change=lambda pixels: pixels[..., 2].fill(0)),
    "black": Case(change=lambda pixels: pixels.fill(0)),
    "opaque": Case(mode="RGBA", change=lambda pixels: pixels[..., 3].fill(255), options=("--mode", "keep")),
    "one class": Case(("ant",), 12),
    "one sample": Case(("ant",), 1),
    "an empty class": Case(options=("--classes", "{folder}/classes.txt")),
    "one number": Case((".",), 12, labels=NUMBER),
    "one sample with a number": Case((".",), 1, labels=NUMBER),
    "one pixel": Case(side=1),
    # Several classes a sample, of which one is everybody's and another nobody's.
    "unmarked": Case((".",), 12, labels={"all": lambda _: 1, "none": lambda _: 0, "some": lambda at: at % 2}),
}
USUAL = ("one sample", "one sample with a number")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command, which ends well or, where `into` is given, with one line and with nothing written there."""

    def run(*arguments: object, into: Path | None = None, may_refuse: bool = False) -> int:
        before = contents(into) if into is not None else None
        capsys.readouterr()
        status = main([*map(str, arguments)])
        err = capsys.readouterr().err
        assert "Traceback" not in err, err
        if status:
            assert may_refuse, (arguments, err)
            assert before is None or (contents(into) == before and "tpucache: " in err), (arguments, err)
        return status

    return run


def contents(folder: Path | None) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.is_file()) if folder and folder.exists() else []


@pytest.mark.parametrize("name", [*USUAL, *thorough(*sorted({*CASES} - {*USUAL}))])
def test_every_command_reads_what_the_others_wrote(name: str, tmp_path: Path, command: Command) -> None:
    source, *options = CASES[name].write(tmp_path / "data")
    cache, out, runs = tmp_path / "cache", tmp_path / "out", tmp_path / "runs"
    out.mkdir()
    command("warmup", source, cache, *options, "--size", SIDE, "--variants", 1, "--jobs", 1)
    samples = Manifest.load(cache).samples
    command("verify", cache)
    command("inspect", cache)
    command("preview", cache, "-o", out / "sheet.png")
    command("preview", cache, "--batch", "-o", out / "batch.png")
    command("report", cache, "--findings", "-o", out / "findings.html")
    command("bench", cache, "--batch-size", min(4, samples))
    assert command("compare", cache, cache, may_refuse=True) in (0, 1)
    short = ["--backend", "eager", "--model", "cnn", "--epochs", 1, "--batch-size", min(4, samples)]
    run, table = runs / "run", out / "predictions.csv"
    validated = [*short, "--valid", cache]
    has_nothing_to_tell_apart = name in ("one class", "one sample")
    status = command("train", cache, "--run", run, *validated, into=run, may_refuse=has_nothing_to_tell_apart)
    assert (status != 0) == has_nothing_to_tell_apart
    if status == 0:
        command("train", cache, "--run", run, *validated, "--resume")
        command("predict", run, cache, "-o", table, "--backend", "eager", "--export", "safetensors")
        assert np.isfinite(probabilities(table)).all()
        command("report", run, "-o", out / "run.html")
        for number, more in enumerate((["--weights", run, "--mixup", 0.2], ["--balance"])):
            other = runs / str(number)
            command("train", cache, "--run", other, *short, *more, into=other, may_refuse=True)
        command("relabel", cache, table, "--soft-labels", into=cache, may_refuse=True)
    folds = runs / "folds"
    if command("relabel", cache, "--make-folds", 2, into=cache, may_refuse=True) == 0 and (
        command("train", cache, "--run", folds, "--folds", *short, into=folds, may_refuse=True) == 0
    ):
        command("suspects", folds, may_refuse=True)
        command("report", folds, "-o", out / "folds.html")


def probabilities(table: Path) -> np.ndarray:
    with table.open(newline="") as file:
        return np.array([row[4:] for row in list(csv.reader(file))[1:]], np.float64)


def test_a_constant_channel_is_divided_by_one(tmp_path: Path, command: Command) -> None:
    cache, run = tmp_path / "cache", tmp_path / "run"
    command("warmup", *CASES["no blue"].write(tmp_path / "data"), cache, "--size", SIDE, "--jobs", 1)
    assert Manifest.load(cache).statistics.std[2] == 0  # the cache says what is
    short = ["--backend", "eager", "--model", "cnn", "--epochs", 1, "--batch-size", 4]
    command("train", cache, "--run", run, *short)
    best = torch.load(run / "best.pt", weights_only=True)
    assert best["std"][2] == 1
    command("train", cache, "--run", tmp_path / "again", *short, "--weights", run)
    assert load_best(tmp_path / "again")["std"] == best["std"]
