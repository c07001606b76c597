"""Samples and variants are added to a finished cache: no existing shard is built again, or touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import Made, build_here, digests
from PIL import Image

from tpucache.errors import BuildError, RecipeError, SampleError, SourceError
from tpucache.progress import BuildProgress
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.manifest import Manifest
from tpucache.store.reader import ShardReader
from tpucache.store.verify import verify_cache
from tpucache.warmup.sources.source import Item

pytestmark = pytest.mark.slow


def identities(cache: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cache.glob("*.lmdb")}


def records(cache: Path) -> dict[tuple[int, str], bytes]:
    manifest = Manifest.load(cache)
    reader, index = ShardReader(cache, manifest.shards), Cache(cache, manifest).index.read_all()
    paths = Cache.open(cache).samples.paths
    places = [(variant, path) for variant in manifest.variants for path in paths]
    return {place: bytes(reader.read(row)) for place, row in zip(places, index, strict=True)}


def flat(number: int) -> Item:
    return Item({"image": np.full((8, 8), number % 251, np.uint8)})


@pytest.fixture
def source(photos: Path, tmp_path: Path) -> Path:
    return shutil.copytree(photos, tmp_path / "source")


def test_variants_are_added_beside_shards_that_stay_as_they_are(photos: Path, jitter: str, tmp_path: Path) -> None:
    cache, whole = tmp_path / "cache", tmp_path / "whole"
    before = build_here(photos, cache, Recipe(size=16, variants=1, augment=jitter))
    existing = identities(cache)
    after = build_here(photos, cache, Recipe(size=16, variants=3, augment=jitter))
    assert existing.items() <= identities(cache).items()
    assert after.variants == (0, 1, 2, 3)
    assert after.fingerprint == before.fingerprint
    assert after.statistics == before.statistics
    assert verify_cache(cache) == []
    build_here(photos, whole, Recipe(size=16, variants=3, augment=jitter))
    assert records(cache) == records(whole)
    shards = {name: digest for name, digest in digests(whole).items() if name.endswith(".lmdb")}
    assert shards.items() <= digests(cache).items()
    assert ".warmup" not in {path.name for path in cache.iterdir()}
    assert verify_cache(f"{cache}@1") == []


def test_samples_are_added_and_the_old_ones_keep_numbers_and_shards(source: Path, jitter: str, tmp_path: Path) -> None:
    cache, recipe = tmp_path / "cache", Recipe(size=16, variants=1, augment=jitter)
    build_here(source, cache, recipe)
    old, existing = records(cache), identities(cache)
    (source / "ant").mkdir()  # a class that sorts before the others
    for number, path in enumerate(sorted((source / "dog").iterdir())[:5]):
        shutil.copy(path, source / "ant" / f"{number}.jpg")
    reports: list[BuildProgress] = []
    manifest = build_here(source, cache, recipe, on_progress=reports.append)
    assert reports[-1].total == 5
    assert existing.items() <= identities(cache).items()
    assert manifest.samples == 155
    assert manifest.classes == ("ant", "cat", "dog", "emu")
    assert manifest.statistics.class_counts == (5, 50, 50, 50)
    assert old.items() <= records(cache).items()
    assert verify_cache(cache) == []
    table = Cache.open(cache).samples
    assert table.numbers.tolist() == list(range(155))
    assert table.labels is not None
    assert [manifest.classes[label] for label in table.labels] == [path.split("/")[0] for path in table.paths]
    assert build_here(source, cache, recipe) == manifest


def test_a_sample_the_cache_has_is_not_skipped_when_variants_are_added(
    source: Path, jitter: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    build_here(source, cache, Recipe(size=16))
    before = digests(cache)
    first = sorted((source / "cat").iterdir())[0]
    data = first.read_bytes()
    first.write_bytes(bytes(len(data)))
    with pytest.raises(SampleError, match=f"{first.name}.*the cache already has records of this sample"):
        build_here(source, cache, Recipe(size=16, variants=1, augment=jitter), on_error="skip")
    assert before.items() <= digests(cache).items()
    first.write_bytes(data)
    build_here(source, cache, Recipe(size=16, variants=1, augment=jitter), on_error="skip")
    assert verify_cache(cache) == []


def test_what_was_begun_is_kept_when_the_finished_cache_is_asked_for(source: Path, jitter: str, tmp_path: Path) -> None:
    cache, reports = tmp_path / "cache", list[BuildProgress]()
    build_here(source, cache, Recipe(size=16))
    with pytest.raises(KeyboardInterrupt):
        build_here(source, cache, Recipe(size=16, variants=1, augment=jitter), check=interrupt)
    build_here(source, cache, Recipe(size=16))
    build_here(source, cache, Recipe(size=16, variants=1, augment=jitter), on_progress=reports.append)
    assert reports[0].samples == 150
    assert sorted(path.name for path in cache.glob("*.npy")) == ["index-1.npy", "index.npy"]


def test_what_cannot_be_added_is_refused_and_changes_nothing(source: Path, jitter: str, tmp_path: Path) -> None:
    cache, recipe = tmp_path / "cache", Recipe(size=16, variants=2, augment=jitter)
    build_here(source, cache, recipe)
    before = digests(cache)
    with pytest.raises(RecipeError, match="variants 2, now 1"):
        build_here(source, cache, Recipe(size=16, variants=1, augment=jitter))
    with pytest.raises(RecipeError, match="augment"):
        build_here(source, cache, Recipe(size=16, variants=3, augment="flip"))
    with pytest.raises(RecipeError, match=r"another recipe: augment .*size \[16, 16\], now \[24, 24\]"):
        build_here(source, cache, Recipe(size=24, variants=2, augment="standard"))
    assert digests(cache) == before


@pytest.mark.parametrize("name", ["", "p/*.bmp", "t.csv"])
def test_pictures_redrawn_at_their_size_are_refused(tmp_path: Path, name: str) -> None:
    def paint(blue: int, *numbers: int) -> None:
        for number in numbers:
            Image.new("RGB", (20, 20), (number, 60, blue)).save(source / f"p/{number}.bmp")

    def build(**options: Any) -> Manifest:
        return build_here(source / name, cache, Recipe(size=8), **options)

    source, cache = tmp_path / "source", tmp_path / "cache"
    (source / "p").mkdir(parents=True)
    paint(100, *range(30))
    (source / "t.csv").write_text("\n".join(["path", *(f"p/{number}.bmp" for number in range(30))]))
    with pytest.raises(KeyboardInterrupt):
        build(check=interrupt)
    paint(101, 17)
    with pytest.raises(BuildError, match=r"17.bmp'.* the source or its code has changed"):
        build()
    paint(100, 17)
    first = build()
    before = digests(cache)
    source = source.rename(tmp_path / "moved")  # where a source lies does not matter
    os.utime(source / "p/0.bmp", (1, 1))
    assert build() == first
    paint(101, 5)
    os.utime(source / "p/5.bmp", (1, 1))
    with pytest.raises(BuildError, match=r"5.bmp'.* the source or its code has changed"):
        build()
    paint(200, *range(30))
    with pytest.raises(SourceError, match=r"another content: '(p/)?0.bmp'"):
        build()
    assert digests(cache) == before


def test_a_cache_of_class_numbers_without_names_is_added_to(jitter: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = build_here(Made(6, flat, lambda at: at % 3), cache)
    assert build_here(Made(6, flat, lambda at: at % 3), cache) == first
    with pytest.raises(SourceError, match="6 samples have another label"):
        build_here(Made(6, flat, lambda at: (at + 1) % 3), cache)
    grown = build_here(Made(9, flat, lambda at: at % 3), cache, Recipe(size=8, variants=1, augment=jitter))
    assert (grown.samples, grown.augmented, grown.statistics.class_counts) == (9, 1, (3, 3, 3))


def test_few_samples_of_a_finished_cache_are_read(tmp_path: Path) -> None:
    build_here(Made(500, flat), tmp_path)
    again = Made(500, flat)
    build_here(again, tmp_path)
    assert len({*again.loaded}) < 20


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.thorough
def test_kaggles_target_keeps_to_its_number_of_files(photos: Path, jitter: str, tmp_path: Path) -> None:
    recipe = Recipe(size=16, variants=20, augment=jitter)
    build_here(photos, tmp_path / "cache", recipe, target="kaggle")
    assert len(list((tmp_path / "cache").iterdir())) == 2 * 21 + 3
