"""What one command writes, every other reads, also of data that hardly vary, or says no in one line."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

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


def pictures(folder: Path, count: int, mode: str = "RGB", side: int = 24) -> list[Path]:
    folder.mkdir(parents=True)
    random, paths = np.random.RandomState(7), []
    for number in range(count):
        pixels = random.randint(0, 256, (side, side, len(mode)), np.uint8)
        paths.append(folder / f"{number}.png")
        Image.fromarray(pixels, mode).save(paths[-1])
    return paths


def table(folder: Path, paths: list[Path], label: Callable[[int], object]) -> Path:
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *((path.name, label(at)) for at, path in enumerate(paths))])
    return folder / "table.csv"


def no_blue(folder: Path) -> list[object]:
    for name in ("ant", "bee"):
        for path in pictures(folder / "source" / name, 6):
            pixels = np.array(Image.open(path))
            pixels[..., 2] = 0
            Image.fromarray(pixels).save(path)
    return [folder / "source"]


def black(folder: Path) -> list[object]:
    for name in ("ant", "bee"):
        for path in pictures(folder / "source" / name, 6):
            Image.new("RGB", (24, 24)).save(path)
    return [folder / "source"]


def opaque(folder: Path) -> list[object]:
    for name in ("ant", "bee"):
        for path in pictures(folder / "source" / name, 6, "RGBA"):
            image = Image.open(path)
            image.putalpha(255)
            image.save(path)
    return [folder / "source", "--mode", "keep"]


def one_class(folder: Path) -> list[object]:
    pictures(folder / "source" / "ant", 12)
    return [folder / "source"]


def one_sample(folder: Path) -> list[object]:
    pictures(folder / "source" / "ant", 1)
    return [folder / "source"]


def empty_class(folder: Path) -> list[object]:
    (folder / "classes.txt").parent.mkdir(parents=True)
    (folder / "classes.txt").write_text("ant\nbee\nnobody\n")
    for name in ("ant", "bee"):
        pictures(folder / "source" / name, 6)
    return [folder / "source", "--classes", folder / "classes.txt"]


def one_number(folder: Path) -> list[object]:
    paths = pictures(folder / "source", 12)
    return [table(folder / "source", paths, lambda _: 2.5), "--label-col", "label"]


def one_sample_with_a_number(folder: Path) -> list[object]:
    paths = pictures(folder / "source", 1)
    return [table(folder / "source", paths, lambda _: 2.5), "--label-col", "label"]


def one_pixel(folder: Path) -> list[object]:
    for name in ("ant", "bee"):
        pictures(folder / "source" / name, 6, side=1)
    return [folder / "source"]


def unmarked(folder: Path) -> list[object]:
    """Several classes a sample, of which one is everybody's and another nobody's."""
    paths = pictures(folder / "source", 12)
    with (folder / "source" / "table.csv").open("w", newline="") as file:
        rows = ((path.name, 1, 0, at % 2) for at, path in enumerate(paths))
        csv.writer(file).writerows([("path", "all", "none", "some"), *rows])
    marks = [text for name in ("all", "none", "some") for text in ("--label-col", name)]
    return [folder / "source" / "table.csv", *marks]


ALL = [
    *thorough(black, opaque, one_class),
    one_sample,
    *thorough(empty_class, one_number),
    one_sample_with_a_number,
    *thorough(one_pixel, unmarked),
]


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


@pytest.mark.parametrize("make", ALL)
def test_every_command_reads_what_the_others_wrote(
    make: Callable[[Path], list[object]], tmp_path: Path, command: Command
) -> None:
    source, *options = make(tmp_path / "data")
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
    has_nothing_to_tell_apart = make in (one_class, one_sample)
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
    command("warmup", *no_blue(tmp_path / "data"), cache, "--size", SIDE, "--jobs", 1)
    assert Manifest.load(cache).statistics.std[2] == 0  # the cache says what is
    short = ["--backend", "eager", "--model", "cnn", "--epochs", 1, "--batch-size", 4]
    command("train", cache, "--run", run, *short)
    best = torch.load(run / "best.pt", weights_only=True)
    assert best["std"][2] == 1
    command("train", cache, "--run", tmp_path / "again", *short, "--weights", run)
    assert load_best(tmp_path / "again")["std"] == best["std"]
