"""Whole warmups: the same bytes however they are run, resumable, and nothing dropped or altered in silence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from made import build_here, digests, write_photos

from tpucache.cli import main
from tpucache.errors import BuildError, RecipeError, SourceError, StoreError, UsageError
from tpucache.progress import BuildProgress
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.copying import CLAIM_NAME
from tpucache.store.manifest import Manifest
from tpucache.store.reader import ShardReader
from tpucache.store.verify import verify_cache
from tpucache.warmup.plan import resolve
from tpucache.warmup.records import presize as presizing
from tpucache.warmup.records.augment import augment
from tpucache.warmup.records.presize import presize, resizer_versions
from tpucache.warmup.sources import FolderSource, Sample

_SIZE = 32
_CLEAN = Recipe(size=_SIZE)
_ENGINE: Any = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}


def _copy(photos: Path, tmp_path: Path) -> Path:
    return shutil.copytree(photos, tmp_path / "source")


def image_of(source: FolderSource, sample: Sample) -> Any:
    return source.load(sample).fields["image"]


def _plain_records(cache: Path) -> dict[tuple[int, int], bytes]:
    records = {}
    for path in sorted(cache.glob("*.lmdb")):
        environment = lmdb.open(str(path), subdir=False, lock=False, readonly=True, create=False, **_ENGINE)
        with environment.begin() as transaction:
            for key, value in transaction.cursor():
                records[int(path.name[1:3]), int.from_bytes(key, "big")] = bytes(value)
        environment.close()
    return records


@pytest.fixture(scope="module")
def standard(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("standard") / "cache"
    build_here(photos, cache, Recipe(size=_SIZE, variants=2, seed=5))
    return cache


@pytest.fixture(scope="module")
def clean(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("clean") / "cache"
    build_here(photos, cache, _CLEAN)
    return cache


@pytest.mark.slow
def test_plain_lmdb_reads_what_presize_and_augment_make(photos: Path, standard: Path) -> None:
    recipe = Recipe(size=_SIZE, variants=2, seed=5)
    definition = resolve(recipe.augment, _SIZE, _SIZE)
    source = FolderSource(photos)
    expected = {}
    for sample in source.list().samples:
        image = presize(image_of(source, sample), recipe, sample.path)
        expected[0, sample.number] = image.tobytes()
        for variant in (1, 2):
            expected[variant, sample.number] = augment(image, definition, 5, sample.number, variant).tobytes()
    assert _plain_records(standard) == expected


def test_the_index_finds_the_records_that_lmdb_finds(standard: Path) -> None:
    manifest = Manifest.load(standard)
    reader, index = ShardReader(standard, manifest.shards), Cache(standard, manifest).index.read_all()
    plain = _plain_records(standard)
    numbers = Cache.open(standard).samples.numbers.tolist()
    positions = [(variant, number) for variant in manifest.variants for number in numbers]
    assert {place: bytes(reader.read(row)) for place, row in zip(positions, index, strict=True)} == plain


def test_a_finished_cache_is_sound_flat_and_holds_nothing_of_the_work(standard: Path, clean: Path) -> None:
    for cache in (standard, clean):
        manifest = Manifest.load(cache)
        names = {entry.name for entry in (*manifest.shards, *manifest.tables)} | {"manifest.json"}
        assert {path.name for path in cache.iterdir()} == names
        assert verify_cache(cache) == []


def test_progress_is_reported_from_finished_samples_to_all(photos: Path, tmp_path: Path) -> None:
    reports: list[BuildProgress] = []
    build_here(photos, tmp_path / "cache", _CLEAN, on_progress=reports.append)
    assert reports[0] == BuildProgress(0, 150, 0, 0)
    assert reports[-1] == BuildProgress(150, 150, 0, 150 * _SIZE * _SIZE * 3)
    assert [existing.samples for existing in reports] == sorted(existing.samples for existing in reports)


@pytest.mark.slow
def test_skipped_samples_are_listed_with_reasons_and_the_rest_is_kept(photos: Path, tmp_path: Path) -> None:
    source, cache = _copy(photos, tmp_path), tmp_path / "cache"
    listing = FolderSource(source).list()
    harm = {3: b"", 60: b"no image at all", 61: (source / listing.samples[61].path).read_bytes()[:700]}
    for number, data in harm.items():
        (source / listing.samples[number].path).write_bytes(data)
    reports: list[int] = []
    manifest = build_here(
        source, cache, _CLEAN, on_error="skip", on_progress=lambda existing: reports.append(existing.skipped)
    )
    assert reports[-1] == 3
    assert [(skip.number, skip.path) for skip in manifest.skipped] == [(n, listing.samples[n].path) for n in harm]
    reasons = [skip.reason for skip in manifest.skipped]
    assert "empty" in reasons[0]
    assert "identify" in reasons[1]
    assert "does not decode" in reasons[2]
    kept = [sample for sample in listing.samples if sample.number not in harm]
    assert manifest.samples == len(kept) == 147
    assert sum(manifest.statistics.class_counts) == 147
    table = Cache.open(cache).samples
    assert table.numbers.tolist() == [sample.number for sample in kept]
    assert list(table.paths) == [sample.path for sample in kept]
    assert table.labels is not None
    assert table.labels.tolist() == [sample.label for sample in kept]
    data = FolderSource(source)
    assert _plain_records(cache) == {
        (0, sample.number): presize(image_of(data, sample), _CLEAN, sample.path).tobytes() for sample in kept
    }
    assert verify_cache(cache) == []
    assert Manifest.load(cache) == manifest


@pytest.mark.parametrize(
    ("recipe", "difference"),
    [
        (Recipe(size=33), r"size \[32, 32\], now \[33, 33\]"),
        (Recipe(size=_SIZE, seed=1), "seed 0, now 1"),
        (Recipe(size=_SIZE, fit="pad"), "fit 'crop', now 'pad'"),
        (Recipe(size=_SIZE, codec="png"), "codec 'raw', now 'png'"),
        (Recipe(size=_SIZE, exact=True), "exact False, now True"),
    ],
    ids=["size", "seed", "fit", "codec", "exact"],
)
def test_another_recipe_is_refused_naming_the_difference_and_changes_nothing(
    photos: Path, clean: Path, tmp_path: Path, recipe: Recipe, difference: str
) -> None:
    cache = shutil.copytree(clean, tmp_path / "cache")
    with pytest.raises(RecipeError, match=difference):
        build_here(photos, cache, recipe)
    assert digests(cache) == digests(clean)


@pytest.mark.parametrize("change", ["removed", "moved to another class", "of another size"])
def test_another_source_is_refused(photos: Path, clean: Path, tmp_path: Path, change: str) -> None:
    source, cache = _copy(photos, tmp_path), shutil.copytree(clean, tmp_path / "cache")
    first = sorted((source / "cat").iterdir())[0]
    if change == "removed":
        first.unlink()
    elif change == "of another size":
        first.write_bytes(first.read_bytes() + b"x")
    else:
        first.rename(source / "dog" / first.name)
    with pytest.raises(SourceError, match=r"cat/.*jpg|dog/.*jpg"):
        build_here(source, cache, _CLEAN)
    assert digests(cache) == digests(clean)


class Drawn:
    def __init__(self, *, again: bool, is_broken: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.rng, self.is_broken = rng if again else None, is_broken
        self.images = rng.integers(0, 256, (4, 8, 8, 3), np.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        if self.is_broken and number == 0:
            return {"image": b"\x89PNG\r\n\x1a\n and no more"}, 0
        image = self.images[number]
        return (image if self.rng is None else self.rng.permuted(image)), number % 2


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_data_set_that_draws_its_items_at_random_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, again: bool, is_broken: bool
) -> None:
    source = Drawn(again=again, is_broken=is_broken)
    build_here(source, tmp_path / "cache", _CLEAN, on_error="skip")
    is_told = "had another content when it was read again" in caplog.text
    assert is_told == (again and not is_broken)  # a skipped sample cannot be compared


@pytest.mark.parametrize("name", ["v00-00001.lmdb", "index.npy", "samples.npz"])
@pytest.mark.parametrize("variants", [0, 1], ids=["finished", "added to"])
def test_a_cache_that_lacks_a_file_or_a_part_of_one_is_not_taken_for_finished(
    photos: Path, clean: Path, tmp_path: Path, name: str, variants: int
) -> None:
    cache = shutil.copytree(clean, tmp_path / "cache")
    recipe = Recipe(size=_SIZE, variants=variants, augment="flip")
    (cache / name).write_bytes((cache / name).read_bytes()[:-4096])
    before = digests(cache)
    with pytest.raises(StoreError, match=rf"{name}.*--repair"):
        build_here(photos, cache, recipe)
    assert digests(cache) == before
    (cache / name).unlink()
    with pytest.raises(StoreError, match=rf"{name} is missing.*--repair"):
        build_here(photos, cache, recipe)


@pytest.mark.parametrize("preset", ["flip", "standard", "strong"])
def test_a_finished_cache_of_a_preset_is_returned_unchanged(tmp_path: Path, preset: str) -> None:
    source, cache = write_photos(tmp_path / "photos", 3), tmp_path / "cache"
    recipe, found = Recipe(size=16, variants=1, augment=preset), []
    for _ in range(2):
        manifest = build_here(source, cache, recipe)
        found.append((manifest, {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cache.iterdir()}))
    assert found[0] == found[1]


REFUSED: dict[str, tuple[str, bytes, type[Exception], str]] = {
    "not a picture of the user's": ("cache/thesis.docx", b"years of work", BuildError, "neither empty nor a cache"),
    "a file of our format's name": ("cache/v00-00000.lmdb", b"", BuildError, "neither empty nor a cache"),
    "a hidden file": ("cache/.hidden", b"", BuildError, "neither empty nor a cache"),
    "a copy that is not finished": (f"cache/{CLAIM_NAME}", b"{}", BuildError, "was not copied to its end"),
    "a file instead of a folder": ("cache", b"not a folder", BuildError, "cannot be written"),
    "no samples": ("photos/.nomedia", b"", SourceError, "no "),
    "no usable samples": ("photos/1.jpg", b"no image", SourceError, r"none of the .*1\.jpg.*identify"),
}


@pytest.mark.parametrize(("name", "content", "error", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_built_from_or_into_is_refused_and_untouched(
    name: str,
    content: bytes,
    error: type[Exception],
    reason: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if name.startswith("cache"):
        write_photos(tmp_path / "photos", 2)
    before = digests(tmp_path)
    with pytest.raises(error, match=reason):
        build_here(tmp_path / "photos", tmp_path / "cache", _CLEAN, on_error="skip")
    assert not (tmp_path / "cache" / "manifest.json").exists()
    assert before.items() <= digests(tmp_path).items()


@pytest.mark.parametrize("where", [".", "cache", "cat/cache", "..", "link"])
def test_a_cache_and_its_source_are_different_folders(
    tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_photos(tmp_path / "home" / "photos", 3)
    (source / "link").symlink_to(source / "dog")
    before = digests(tmp_path)
    with pytest.raises(UsageError, match="another folder for the cache"):
        build_here(source, source / where, _CLEAN)
    assert main(["warmup", str(source), str(source / where), "--size", "8"]) == 2
    assert "another folder for the cache" in capsys.readouterr().err
    assert digests(tmp_path) == before


def test_the_manifest_says_with_what_it_was_made(clean: Path) -> None:
    manifest = Manifest.load(clean)
    assert {"tpucache", "numpy", "pillow", "libjpeg", "lmdb", "pillow-heif", "pydicom"} <= manifest.created_by.keys()
    assert Recipe.from_dict(manifest.recipe) == _CLEAN
    assert json.loads(manifest.to_json())["source"]["samples"] == 150


@pytest.mark.slow
def test_additions_by_other_versions_are_reported(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_here(photos, tmp_path / "cache", _CLEAN)
    made = resizer_versions()["cykooz_resizer"] or "none"
    monkeypatch.setattr(presizing, "resizer_versions", lambda: {"cykooz_resizer": "99.0"})
    build_here(photos, tmp_path / "cache", _CLEAN)
    assert not caplog.records
    build_here(photos, tmp_path / "cache", Recipe(size=_SIZE, variants=1))
    (message,) = [record.message for record in caplog.records]
    assert message.endswith(f"so added records may differ: cykooz_resizer {made}, now 99.0")


@pytest.mark.parametrize(
    "argument", [{"on_error": "ignore"}, {"target": "s3"}, {"time_limit": -1}, {"time_limit": float("nan")}], ids=str
)
def test_arguments_that_cannot_be_meant_are_refused(photos: Path, tmp_path: Path, argument: Any) -> None:
    with pytest.raises(UsageError, match=next(iter(argument))):
        build_here(photos, tmp_path / "cache", **argument)
    assert not (tmp_path / "cache").exists()
