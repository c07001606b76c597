"""Training and prediction from a cache whose images the device finishes, on plain torch and on XLA."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import TRUST, command, report_of, rows_of
from thorough import thorough

from tpucache import Recipe, build_cache

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


def train(cache: Path, run: Path) -> list[float]:
    assert command("train", cache, "--run", run, *OPTIONS, "--backend", "eager") == 0
    return list(report_of(run)["losses"])


@pytest.mark.parametrize("codec", [*thorough("dct-zstd"), "yuv420"])
def test_losses_are_close_to_those_of_raw_pixels(packed: dict[str, Path], codec: str, tmp_path: Path) -> None:
    raw = train(packed["raw"], tmp_path / "raw")
    assert train(packed[codec], tmp_path / codec) == pytest.approx(raw, abs=0.02)


def test_a_run_predicts_from_a_cache_of_another_codec(packed: dict[str, Path], tmp_path: Path) -> None:
    train(packed["dct-zstd"], tmp_path / "run")
    rows = {}
    for codec, cache in packed.items():
        out = tmp_path / f"{codec}.csv"
        assert command("predict", tmp_path / "run", cache, "-o", out, "--backend", "eager", "--trust", TRUST[0]) == 0
        rows[codec] = [float(row["ant"]) for row in rows_of(out)]
    assert rows["dct-zstd"] == pytest.approx(rows["raw"], abs=0.02)
    assert rows["yuv420"] == pytest.approx(rows["raw"], abs=0.02)
