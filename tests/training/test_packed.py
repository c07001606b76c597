"""Training and prediction from a cache whose images the device finishes, on plain torch and on XLA."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from running import report_of
from thorough import thorough

from tpucache import Recipe, build_cache
from tpucache.cli import main

pytestmark = pytest.mark.slow

OPTIONS = [
    *("--valid", "0.2", "--model", "tiny_models:tiny", "--epochs", "2", "--batch-size", "16", "--lr", "0.02"),
    *("--flip", "--augment", "shift=2,brightness=0.2,views=2"),
]


@pytest.fixture(scope="module")
def packed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The photographs as raw pixels and as packed coefficients of the best quality."""
    folder = tmp_path_factory.mktemp("packed")
    for codec, quality in (("raw", None), ("dct-zstd", 100), ("yuv420", None)):
        build_cache(photos, folder / codec, Recipe(size=16, codec=codec, quality=quality), jobs=1)
    return {codec: folder / codec for codec in ("raw", "dct-zstd", "yuv420")}


def losses_of(run: Path) -> list[float]:
    report: dict[str, Any] = report_of(run)
    assert report["pace"]["compiles"] == 0
    return list(report["losses"])


def train(cache: Path, run: Path, *more: str) -> list[float]:
    assert main(["train", str(cache), "--run", str(run), *OPTIONS, "--backend", "eager", *more]) == 0
    return losses_of(run)


@pytest.mark.parametrize("codec", [*thorough("dct-zstd"), "yuv420"])
def test_losses_are_close_to_those_of_raw_pixels(packed: dict[str, Path], codec: str, tmp_path: Path) -> None:
    raw = train(packed["raw"], tmp_path / "raw")
    assert train(packed[codec], tmp_path / codec) == pytest.approx(raw, abs=0.02)


def test_a_run_predicts_from_a_cache_of_another_codec(packed: dict[str, Path], tmp_path: Path) -> None:
    train(packed["dct-zstd"], tmp_path / "run")
    rows = {}
    for codec, cache in packed.items():
        out = tmp_path / f"{codec}.csv"
        words = ["predict", tmp_path / "run", cache, "-o", out, "--backend", "eager", "--trust", "tiny_models:tiny"]
        assert main([*map(str, words)]) == 0
        with out.open() as file:
            rows[codec] = [float(row["ant"]) for row in csv.DictReader(file)]
    assert rows["dct-zstd"] == pytest.approx(rows["raw"], abs=0.02)
    assert rows["yuv420"] == pytest.approx(rows["raw"], abs=0.02)
