"""A cache is made in a folder of its own, and what an unfinished build says of itself is read strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made import build_here
from PIL import Image

from tpucache import Recipe, verify_cache
from tpucache.errors import BuildError, RecipeError, SampleError, SourceError, UsageError
from tpucache.store.format import MANIFEST_NAME, WORK_NAME
from tpucache.warmup import open_source, select_source
from tpucache.warmup.run.folder import check_source


def test_a_cache_may_be_neither_its_source_nor_inside_it_nor_around_it(tmp_path: Path) -> None:
    source = tmp_path / "photos"
    source.mkdir()
    for cache in (source, source / "cache", tmp_path):
        with pytest.raises(UsageError, match="give another folder for the cache"):
            check_source(source, cache)
    check_source(source, tmp_path / "cache")


def test_a_source_that_is_no_folder_may_be_named_anywhere(tmp_path: Path) -> None:
    (tmp_path / "photos.csv").touch()
    check_source(tmp_path / "photos.csv", tmp_path)
    check_source("module:name", Path.cwd())


@pytest.mark.parametrize("name", [MANIFEST_NAME, WORK_NAME])
def test_a_cache_that_was_begun_inside_its_source_may_be_finished(tmp_path: Path, name: str) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name).touch()
    check_source(tmp_path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"before": "", "before": "x"}', "the key 'before' is there twice"),
        ('{"before": ', "cannot be read"),
        ("[]", "it is a list"),
        ('{"before": ""}', "another release of tpucache wrote it. Remove"),
    ],
)
def test_a_plan_that_cannot_be_read_is_a_build_error(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "a.png")
    (tmp_path / "images" / "b.png").write_bytes(b"no image")
    with pytest.raises(SampleError):
        build_here(tmp_path / "images", tmp_path / "cache")
    (tmp_path / "cache" / WORK_NAME / "plan.json").write_text(text)
    with pytest.raises(BuildError, match=reason):
        build_here(tmp_path / "images", tmp_path / "cache")


@pytest.mark.parametrize(
    ("other", "options"),
    [({"size": 16}, {}), ({}, {"labels": "numbers"}), ({}, {"limit": 1})],
    ids=["recipe", "labels", "samples"],
)
def test_a_plan_by_which_nothing_was_made_gives_way_to_another(
    tmp_path: Path, other: dict[str, int], options: dict[str, Any]
) -> None:
    images, cache = tmp_path / "images", tmp_path / "cache"
    for name in "12":
        (images / name).mkdir(parents=True)
        (images / name / "a.png").write_bytes(b"no image")
    with pytest.raises(SampleError):
        build_here(images, cache)
    assert (cache / WORK_NAME / "plan.json").exists()
    for path in images.glob("*/*"):
        Image.new("RGB", (8, 8)).save(path)
    source = select_source(open_source(images), limit=options.pop("limit", None))
    manifest = build_here(source, cache, Recipe(**{"size": 8, **other}), **options)
    assert manifest.samples >= 1
    assert verify_cache(cache) == []
    assert not (cache / WORK_NAME).exists()


def test_a_plan_by_which_samples_were_made_does_not(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(150):
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / f"{number:02}.png")
    (tmp_path / "images" / "149.png").write_bytes(b"no image")
    with pytest.raises(SampleError):
        build_here(tmp_path / "images", tmp_path / "cache")
    assert list((tmp_path / "cache" / WORK_NAME).glob("shard-*.npz"))
    with pytest.raises(RecipeError, match=r"another recipe: .*Give the same options to continue"):
        build_here(tmp_path / "images", tmp_path / "cache", Recipe(size=16))
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "more.png")
    with pytest.raises(SourceError, match=r"150 samples, the source now has 151; 1 new: 'more\.png'"):
        build_here(tmp_path / "images", tmp_path / "cache")
