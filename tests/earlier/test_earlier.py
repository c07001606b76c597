"""What version 0.1 wrote is still read, extended, resumed and used for prediction, with the same bytes.

`data` was written by that version: a cache of 12 noise images, a finished run on it, and one stopped after
3 of 4 steps.
`expected.json` has the record hashes that it wrote when variants or samples were added, and the finished run's losses.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tpucache import CachedDataset, Recipe, build_cache, verify_cache
from tpucache.cli import main

pytestmark = pytest.mark.usefixtures("short_runs")

DATA = Path(__file__).parent / "data"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())


def write_images(folder: Path, count: int) -> list[np.ndarray[Any, Any]]:
    """Write the images that the cache was made of, and return their pixels."""
    rng = np.random.default_rng(5)
    images = [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(count)]
    for number, pixels in enumerate(images):
        path = folder / "ab"[number % 2] / f"{number:02d}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return images


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A copy of the cache, to be written to."""
    return Path(shutil.copytree(DATA / "cache", tmp_path / "cache"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a command on plain torch, with the network that the runs are of on the path."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "training")

    def run(*arguments: str | Path) -> None:
        assert main([*map(str, arguments), "--backend", "eager"]) == 0

    return run


def test_the_cache_is_read_and_verified(tmp_path: Path) -> None:
    images = write_images(tmp_path, 12)
    dataset = CachedDataset(DATA / "cache")
    order = [*range(0, 12, 2), *range(1, 12, 2)]
    for (image, label), number in zip(dataset, order, strict=True):
        assert np.array_equal(image.permute(1, 2, 0), images[number])
        assert int(label) == number % 2
    assert verify_cache(DATA / "cache") == []


@pytest.mark.parametrize(("name", "count", "variants"), [("variants", 12, 1), ("samples", 16, 0)])
def test_the_cache_is_extended_to_the_same_records(
    cache: Path, tmp_path: Path, name: str, count: int, variants: int
) -> None:
    write_images(tmp_path / "images", count)
    manifest = build_cache(tmp_path / "images", cache, Recipe(size=32, variants=variants, augment="flip"), jobs=1)
    assert {entry.name: entry.records_sha256 for entry in manifest.shards} == EXPECTED[name]
    assert verify_cache(cache) == []


@pytest.mark.slow
def test_the_stopped_run_resumes_to_the_finished_one(tmp_path: Path, command: Callable[..., None]) -> None:
    run = Path(shutil.copytree(DATA / "stopped", tmp_path / "run"))
    options = "--valid 0.25 --model tiny_models:tiny --epochs 2 --batch-size 4 --lr 0.05 --flip --ema 0.9 --resume"
    command("train", DATA / "cache", "--run", run, *options.split())
    losses = json.loads((run / "report.json").read_text())["losses"]
    assert np.allclose(losses, EXPECTED["losses"], rtol=0, atol=1e-5)
    assert numbers_of(run / "history.csv") == pytest.approx(numbers_of(DATA / "finished/history.csv"), abs=1e-5)


def test_the_finished_run_predicts_the_same(tmp_path: Path, command: Callable[..., None]) -> None:
    out = tmp_path / "predictions.csv"
    command("predict", DATA / "finished", DATA / "cache", "-o", out, "--trust", "tiny_models:tiny")
    assert numbers_of(out) == pytest.approx(numbers_of(DATA / "predictions.csv"), abs=1e-5)


def numbers_of(table: Path) -> list[float]:
    """Return all numbers of a CSV file, row by row."""
    with table.open() as file:
        rows = list(csv.reader(file))
    return [float(cell) for row in rows[1:] for cell in row if re.fullmatch(r"[-+.e\d]+", cell)]
