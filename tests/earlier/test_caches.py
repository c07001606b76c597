"""Caches that version 0.2.0 wrote are read, verified, added to and finished, to the same records.

`make_data.py` made `data/0.2.0.zip` with its code, and `data/records.json` has what the first commits made of noise.
"""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pictures import Pixels, in_order, write_deep_images, write_images, write_mosaics

from tpucache import CachedDataset, FormatError, Manifest, Recipe, SourceError, build_cache, repair_cache, verify_cache
from tpucache.errors import BuildError
from tpucache.loading.loader import CachedLoader
from tpucache.store.format import VERSION, WORK_NAME
from tpucache.warmup.run import scheduler

DATA = Path(__file__).parent / "data"
RELEASE = "0.2.0"
CODECS = ("raw", "yuv420", "dct-zstd", "dct-lz4", "jpeg", "png", "zstd")
LOSSLESS = ("raw", "png", "zstd")
#: What other versions of the libraries may change in pixels of the codecs that lose some.
MARGIN = 2
Unpacked = Callable[[str], Path]


def pixels_of(cache: Path, variant: int = 0) -> Pixels:
    dataset = CachedDataset(cache, variant=variant)
    return np.stack([np.asarray(dataset[at][0]) for at in range(len(dataset))]).astype(np.int64)


def expected_pixels(data: Path, codec: str, images: list[Pixels]) -> Pixels:
    """Return the pixels of a cache as (n, channels, height, width): the images', or what the commit itself read."""
    if codec in LOSSLESS:
        return np.stack([images[number].transpose(2, 0, 1) for number in in_order(6)]).astype(np.int64)
    with np.load(data / "pixels.npz") as arrays:
        return arrays[codec].astype(np.int64)


def copied(data: Path, name: str, target: Path) -> Path:
    return Path(shutil.copytree(data / name, target))


def recipe_of(codec: str = "raw") -> Recipe:
    return Recipe(size=16, codec=codec, variants=1, augment="flip")


def assert_as_of(cache: Path, data: Path, codec: str, images: list[Pixels]) -> None:
    """Check all pixels of a cache of nine images and a variant that six of them were in before."""
    before, clean, flipped = expected_pixels(data, codec, images), pixels_of(cache), pixels_of(cache, 1)
    margin = 0 if codec in LOSSLESS else MARGIN
    assert abs(clean[:6] - before).max() <= margin
    assert clean.shape == flipped.shape == (9, 3, 16, 16)
    if codec in LOSSLESS:
        is_same = (flipped == clean).all((1, 2, 3))
        assert ((flipped == clean[..., ::-1]).all((1, 2, 3)) | is_same).all()
        assert 0 < is_same.sum() < 9


@pytest.mark.parametrize("codec", CODECS)
def test_a_cache_is_read_and_verified(unpacked: Unpacked, tmp_path: Path, codec: str) -> None:
    cache, images = unpacked(RELEASE) / codec, write_mosaics(tmp_path, 6)
    difference = pixels_of(cache) - expected_pixels(unpacked(RELEASE), codec, images)
    assert abs(difference).max() <= (0 if codec in LOSSLESS else MARGIN)
    assert verify_cache(cache) == []
    manifest = Manifest.load(cache)
    assert (cache / "manifest.json").read_text() in (manifest.to_json(), manifest.text)
    assert list(CachedDataset(cache).labels) == [0, 0, 0, 1, 1, 1]
    batches = CachedLoader(CachedDataset(cache), 6)
    assert all((images.numpy() == pixels_of(cache)).all() for images, _ in batches)


def test_a_cache_of_deep_images_is_read_and_added_to(unpacked: Unpacked, tmp_path: Path) -> None:
    cache, images = copied(unpacked(RELEASE), "deep", tmp_path / "cache"), write_deep_images(tmp_path / "images", 7)
    assert Manifest.load(cache).version == VERSION
    build_cache(tmp_path / "images", cache, Recipe(size=16, mode="keep"), jobs=1)
    assert Manifest.load(cache).version == VERSION
    expected = np.stack([images[number] for number in (*in_order(6), 6)])
    assert (pixels_of(cache)[:, 0] == expected).all()
    assert verify_cache(cache) == []


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_cache_is_added_to(unpacked: Unpacked, tmp_path: Path, codec: str) -> None:
    data, cache = unpacked(RELEASE), copied(unpacked(RELEASE), codec, tmp_path / "cache")
    images = write_mosaics(tmp_path / "images", 9)
    shard = (cache / "v00-00000.lmdb").read_bytes()
    manifest = build_cache(tmp_path / "images", cache, recipe_of(codec), jobs=1)
    assert (manifest.version, Manifest.load(cache)) == (VERSION, manifest)
    assert (cache / "v00-00000.lmdb").read_bytes() == shard
    assert verify_cache(cache) == []
    assert_as_of(cache, data, codec, images)
    if codec == "raw":  # of other codecs, the bytes are those of a version of a library
        expected = json.loads((data / "expected.json").read_text())["added"][codec]
        assert {entry.name: entry.records_sha256 for entry in manifest.shards} == expected


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="shards have the page size of the machine that they were made on")
def test_a_damaged_cache_is_repaired_to_the_same_bytes(unpacked: Unpacked, tmp_path: Path) -> None:
    data, cache = unpacked(RELEASE) / "raw", copied(unpacked(RELEASE), "raw", tmp_path / "cache")
    write_mosaics(tmp_path / "images", 6)
    for name in ("v00-00000.lmdb", "samples.npz", "index.npy"):
        damaged = bytearray((cache / name).read_bytes())
        damaged[-9] ^= 1
        (cache / name).write_bytes(damaged)
    repair_cache(tmp_path / "images", cache, jobs=1)
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == {
        path.name: path.read_bytes() for path in data.iterdir()
    }


def test_an_interrupted_warmup_is_finished_from_its_chunks(
    unpacked: Unpacked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, images = copied(unpacked(RELEASE), "begun", tmp_path / "cache"), write_mosaics(tmp_path / "images", 6)
    built, build_chunk = [], scheduler.build_chunk
    monkeypatch.setattr(
        scheduler,
        "build_chunk",
        lambda context, chunk, items: (built.append(chunk.number), build_chunk(context, chunk, items))[1],
    )
    assert len(list((cache / WORK_NAME).glob("chunk-*.json"))) == 4
    manifest = build_cache(tmp_path / "images", cache, recipe_of(), jobs=1)
    assert built == [4, 5]
    assert (manifest.version, manifest.samples, manifest.augmented) == (VERSION, 6, 1)
    assert (pixels_of(cache) == expected_pixels(unpacked(RELEASE), "raw", images)).all()
    assert verify_cache(cache) == []
    assert not (cache / WORK_NAME).exists()


def test_an_interrupted_addition_is_finished_from_its_shards(
    unpacked: Unpacked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, cache = unpacked(RELEASE), copied(unpacked(RELEASE), "adding", tmp_path / "cache")
    images = write_mosaics(tmp_path / "images", 9)
    receipted = cache / "v01-00000.lmdb"
    before = receipted.stat()
    manifest = build_cache(tmp_path / "images", cache, recipe_of(), jobs=1)
    assert (receipted.stat().st_ino, receipted.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    expected = json.loads((data / "expected.json").read_text())["added"]["raw"]
    assert {entry.name: entry.records_sha256 for entry in manifest.shards} == expected
    assert_as_of(cache, data, "raw", images)
    assert verify_cache(cache) == []
    assert not (cache / WORK_NAME).exists()


def test_an_interrupted_warmup_is_not_continued_with_other_labels(unpacked: Unpacked, tmp_path: Path) -> None:
    cache = copied(unpacked(RELEASE), "begun", tmp_path / "cache")
    write_mosaics(tmp_path / "images", 6)
    with pytest.raises(SourceError, match="was started with --labels auto, now classes"):
        build_cache(tmp_path / "images", cache, recipe_of(), jobs=1, labels="classes")


@pytest.mark.parametrize(("name", "count", "variants"), [("variants", 12, 1), ("samples", 16, 0)])
def test_noise_becomes_the_records_that_the_first_commits_made(
    tmp_path: Path, name: str, count: int, variants: int
) -> None:
    write_images(tmp_path / "images", 12)
    build_cache(tmp_path / "images", tmp_path / "cache", Recipe(size=32), jobs=1)
    write_images(tmp_path / "images", count)
    recipe = Recipe(size=32, variants=variants, augment="flip")
    manifest = build_cache(tmp_path / "images", tmp_path / "cache", recipe, jobs=1)
    expected = json.loads((DATA / "records.json").read_text())[name]
    assert {entry.name: entry.records_sha256 for entry in manifest.shards} == expected


def test_an_interrupted_warmup_of_before_the_first_release_is_refused_with_a_remedy(
    unpacked: Unpacked, tmp_path: Path
) -> None:
    cache = copied(unpacked(RELEASE), "begun", tmp_path / "cache")
    write_mosaics(tmp_path / "images", 6)
    plan = json.loads((cache / WORK_NAME / "plan.json").read_text())
    for key in ("labels", "asked", "retry"):
        del plan[key]
    (cache / WORK_NAME / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(BuildError, match=r"with the version before 0\.2 that began it.*Remove .* to give up"):
        build_cache(tmp_path / "images", cache, recipe_of(), jobs=1)


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_a_cache_of_before_the_first_release_is_refused_with_a_remedy(
    unpacked: Unpacked, tmp_path: Path, version: int
) -> None:
    cache = copied(unpacked(RELEASE), "raw", tmp_path / "cache")
    content = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps({**content, "version": version}))
    with pytest.raises(FormatError, match=r"build the cache again, or have tpucache 0\.2 convert it"):
        CachedDataset(cache)
    with pytest.raises(FormatError, match=r"0\.2 convert it"):
        build_cache(tmp_path, cache, Recipe(size=16), jobs=1)


@pytest.mark.parametrize("version", [0, 1, 9, 99, "6", None])
def test_a_version_that_no_commit_wrote_is_refused_with_a_remedy(
    unpacked: Unpacked, tmp_path: Path, version: object
) -> None:
    cache = copied(unpacked(RELEASE), "raw", tmp_path / "cache")
    content = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps({**content, "version": version}))
    with pytest.raises(
        FormatError, match=f"version is {version!r}, .*install the tpucache that wrote the cache, or build"
    ):
        CachedDataset(cache)


@pytest.mark.parametrize(
    ("codec", "packing"),
    [("dct-zstd", None), ("dct-lz4", None), ("dct-lz4", "sparse"), ("dct-zstd", "nibbles")],
)
def test_a_packing_that_no_release_wrote_is_refused_with_a_remedy(
    unpacked: Unpacked, tmp_path: Path, codec: str, packing: str | None
) -> None:
    cache = copied(unpacked(RELEASE), codec, tmp_path / "cache")
    content = json.loads((cache / "manifest.json").read_text())
    del content["fields"][0]["packing"]
    if packing is not None:
        content["fields"][0]["packing"] = packing
    (cache / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match=f"no release wrote {packing!r}.* build it again"):
        CachedDataset(cache)
