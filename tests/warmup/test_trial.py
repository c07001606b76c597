"""A dry run says what a warmup would do, and does nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_bytes import RGB, png_file
from made import build_here, digests, jpeg, smooth_image, write_rows
from PIL import Image

from tpucache import Recipe
from tpucache.cli import main
from tpucache.errors import SampleError
from tpucache.warmup import TableOptions, TableSource, dry_run


def run(source: Path, cache: Path, *flags: str) -> int:
    return main(
        ["warmup", str(source), str(cache), "--size", "16", "--codec", "raw", "--jobs", "1", "--dry-run", *flags]
    )


@pytest.mark.slow
def test_files_sizes_labels_and_an_estimate_are_shown_and_no_cache_is_made(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(photos, tmp_path / "source")
    (source / "cat" / "notes.txt").write_text("text")
    (source / "cat" / "bad.png").write_bytes(b"no image")
    before = sorted(tmp_path.rglob("*"))
    assert run(source, tmp_path / "cache") == 0
    text = capsys.readouterr().out
    for part in (
        "150 .jpg, 1 .png",
        "3 classes: cat 51, dog 50, emu 50",
        "1 .txt",
        "JPEG RGB",
        "151 records",
    ):
        assert part in text
    assert run(source, tmp_path / "cache", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == {".jpg": 150, ".png": 1}
    assert report["left_out"] == {".txt": 1}
    assert report["sizes"] == {"smallest": [150, 100], "median": [150, 100], "largest": [150, 100]}
    assert (report["samples"], report["tried"], report["classes"]) == (151, 64, ["cat", "dog", "emu"])
    assert sorted(tmp_path.rglob("*")) == before


_SETS: dict[str, tuple[Callable[[Any, int], Any], Recipe]] = {
    "noise as jpeg": (lambda rng, _: rng.integers(0, 256, (60, 80, 3)), Recipe(size=64, codec="jpeg")),
    "half flat, half noise": (
        lambda rng, number: rng.integers(0, 256 if number % 2 else 2, (60, 80, 3)),
        Recipe(size=64, codec="jpeg"),
    ),
    "growing noise": (
        lambda rng, number: rng.integers(0, 1 + 2 * number, (50, 50, 3)),
        Recipe(size=48, codec="png", variants=1, augment="quarter_turn_by_test:turn"),
    ),
    "raw": (lambda rng, _: rng.integers(0, 256, (30, 30, 3)), Recipe(size=32)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "recipe"), _SETS.values(), ids=_SETS)
def test_the_estimate_is_within_a_factor_of_one_and_a_half(
    draw: Callable[[Any, int], Any], recipe: Recipe, tmp_path: Path, write_module: Callable[[str, str], None]
) -> None:
    write_module("quarter_turn_by_test", "def turn(image, generator):\n    return image[::-1].copy()\n")
    rng = np.random.default_rng(1)
    (tmp_path / "source").mkdir()
    for number in range(120):
        Image.fromarray(draw(rng, number).astype(np.uint8)).save(tmp_path / "source" / f"{number:03}.png")
    found = dry_run(tmp_path / "source", tmp_path / "cache", recipe, jobs=1)
    assert not (tmp_path / "cache").exists()
    manifest = build_here(tmp_path / "source", tmp_path / "cache", recipe)
    assert found.estimate.records == manifest.records
    actual = sum(entry.bytes for entry in manifest.shards)
    assert actual / 1.5 < found.estimate.bytes < actual * 1.5


def test_labels_are_those_that_a_build_reads(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.jpg"))
    rows = [f"{path},{number},{number / 4}" for number, path in enumerate(paths[:20])]
    table = tmp_path / "t.csv"
    write_rows(table, "path,targets,age", *rows, "missing.jpg,20,1.5")
    source = TableSource(table, TableOptions(label_cols=("age",), root=photos))
    found = dry_run(source, tmp_path / "cache", Recipe(size=8))
    assert found.labels == {"asked": "auto", "kind": "numbers", "columns": 1, "least": 0.0, "most": 4.75}
    assert [(tried.path, "cannot be read" in tried.reason) for tried in found.failed] == [("missing.jpg", True)]
    assert run(table, tmp_path / "cache", "--root", str(photos), "--limit", "5") == 0
    assert "labels    21 classes" in capsys.readouterr().out


def test_samples_that_a_build_refuses_before_it_begins_are_all_listed(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = dry_run(photos, tmp_path / "cache", Recipe(size=8), classes=["dog"])
    assert (found.classes, found.class_counts, len(found.listed)) == (("dog",), (50,), 100)
    assert {tried.path.partition("/")[0] for tried in found.listed} == {"cat", "emu"}
    assert all("which is none of the 1 given" in tried.reason for tried in found.listed)
    with pytest.raises(SampleError, match="which is none of the 1 given"):
        build_here(photos, tmp_path / "cache", classes=["dog"])
    assert not (tmp_path / "cache").exists()
    (tmp_path / "classes.txt").write_text("dog")
    assert run(photos, tmp_path / "cache", "--classes", str(tmp_path / "classes.txt")) == 0
    assert "refused   100 samples before anything is built, without --on-error skip" in capsys.readouterr().out


@pytest.mark.slow
def test_only_what_a_finished_cache_lacks_is_estimated(photos: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    build_here(photos, cache)
    before = digests(cache)
    assert dry_run(photos, cache, Recipe(size=8)).estimate.records == 0
    assert digests(cache) == before


@pytest.mark.slow
def test_a_hostile_folder_is_reported(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    good = jpeg(smooth_image(40, 30))
    for name, data in (("a.jpg", good), ("b.jpg", good[: len(good) // 2]), ("c.png", b""), ("e\n\x1b[31m.jpg", good)):
        (source / name).write_bytes(data)
    os.mkfifo(source / "d.jpg")
    (source / "f.jpg").symlink_to("f.jpg")
    (source / "g.png").write_bytes(png_file(20_000, 20_000, 8, RGB, rows=1))
    found = dry_run(source, tmp_path / "cache", Recipe(size=8))
    assert [tried.path for tried in found.tried if not tried.reason] == ["a.jpg", "e\n\x1b[31m.jpg"]
    assert len(found.failed) == 5
    assert run(source, tmp_path / "cache") == 0
    assert not (tmp_path / "cache").exists()
