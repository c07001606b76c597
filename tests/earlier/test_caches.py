"""Caches that two earlier commits wrote are read, verified, added to and finished, to the same records.

`make_data.py` made `data/COMMIT.zip` with their code.
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
from tpucache.loading.loader import CachedLoader
from tpucache.store.format import VERSION, WORK_NAME
from tpucache.warmup import TableOptions, relabel_cache
from tpucache.warmup.run import scheduler

DATA = Path(__file__).parent / "data"
COMMITS = ("e3a34f9", "8782811")
#: The codecs that each commit had, with the version of its manifests.
CODECS = {
    "e3a34f9": {"raw": 2, "jpeg": 2, "png": 2, "zstd": 2},
    "8782811": {"raw": 2, "yuv420": 3, "dct-zstd": 5, "dct-lz4": 6, "jpeg": 2, "png": 2, "zstd": 2},
}
CACHES = [(commit, codec) for commit, codecs in CODECS.items() for codec in codecs]
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


@pytest.mark.parametrize(("commit", "codec"), CACHES)
def test_a_cache_is_read_and_verified(unpacked: Unpacked, tmp_path: Path, commit: str, codec: str) -> None:
    cache, images = unpacked(commit) / codec, write_mosaics(tmp_path, 6)
    difference = pixels_of(cache) - expected_pixels(unpacked(commit), codec, images)
    assert abs(difference).max() <= (0 if codec in LOSSLESS else MARGIN)
    assert verify_cache(cache) == []
    manifest = Manifest.load(cache)
    assert manifest.version == CODECS[commit][codec]
    assert manifest.to_json() == (cache / "manifest.json").read_text()
    assert list(CachedDataset(cache).labels) == [0, 0, 0, 1, 1, 1]
    batches = CachedLoader(CachedDataset(cache), 6)
    assert all((images.numpy() == pixels_of(cache)).all() for images, _ in batches)


def test_a_cache_of_deep_images_is_read_and_added_to(unpacked: Unpacked, tmp_path: Path) -> None:
    cache, images = copied(unpacked("8782811"), "deep", tmp_path / "cache"), write_deep_images(tmp_path / "images", 7)
    assert Manifest.load(cache).version == 4
    build_cache(tmp_path / "images", cache, Recipe(size=16, mode="keep"), jobs=1)
    assert Manifest.load(cache).version == VERSION
    expected = np.stack([images[number] for number in (*in_order(6), 6)])
    assert (pixels_of(cache)[:, 0] == expected).all()
    assert verify_cache(cache) == []


@pytest.mark.slow
@pytest.mark.parametrize(("commit", "codec"), CACHES)
def test_a_cache_is_added_to(unpacked: Unpacked, tmp_path: Path, commit: str, codec: str) -> None:
    data, cache = unpacked(commit), copied(unpacked(commit), codec, tmp_path / "cache")
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


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("by", ["relabel", "changed"])
def test_a_cache_that_is_changed_is_of_the_newest_version(
    unpacked: Unpacked, tmp_path: Path, commit: str, by: str
) -> None:
    cache, images = copied(unpacked(commit), "zstd", tmp_path / "cache"), write_mosaics(tmp_path / "images", 6)
    if by == "relabel":
        names = [f"{'ab'[number % 2]}/{number:02d}.bmp" for number in range(6)]
        (tmp_path / "labels.csv").write_text("\n".join(["path,label", *(f"{name},same" for name in names)]))
        relabel_cache(cache, tmp_path / "labels.csv", TableOptions(label_cols=("label",)))
    else:
        Manifest.load(cache).changed().save(cache)
    assert Manifest.load(cache).version == VERSION
    assert list(CachedDataset(cache).labels) == [0, 0, 0, 0, 0, 0] if by == "relabel" else [0, 0, 0, 1, 1, 1]
    assert (pixels_of(cache) == expected_pixels(unpacked(commit), "zstd", images)).all()
    assert verify_cache(cache) == []


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="shards have the page size of the machine that they were made on")
@pytest.mark.parametrize("commit", COMMITS)
def test_a_damaged_cache_is_repaired_to_the_same_bytes(unpacked: Unpacked, tmp_path: Path, commit: str) -> None:
    data, cache = unpacked(commit) / "raw", copied(unpacked(commit), "raw", tmp_path / "cache")
    write_mosaics(tmp_path / "images", 6)
    for name in ("v00-00000.lmdb", "samples.npz", "index.npy"):
        damaged = bytearray((cache / name).read_bytes())
        damaged[-9] ^= 1
        (cache / name).write_bytes(damaged)
    repair_cache(tmp_path / "images", cache, jobs=1)
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == {
        path.name: path.read_bytes() for path in data.iterdir()
    }


@pytest.mark.parametrize("commit", COMMITS)
def test_an_interrupted_warmup_is_finished_from_its_chunks(
    unpacked: Unpacked, tmp_path: Path, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, images = copied(unpacked(commit), "begun", tmp_path / "cache"), write_mosaics(tmp_path / "images", 6)
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
    assert (pixels_of(cache) == expected_pixels(unpacked(commit), "raw", images)).all()
    assert verify_cache(cache) == []
    assert not (cache / WORK_NAME).exists()


@pytest.mark.parametrize("commit", COMMITS)
def test_an_interrupted_addition_is_finished_from_its_shards(
    unpacked: Unpacked, tmp_path: Path, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, cache = unpacked(commit), copied(unpacked(commit), "adding", tmp_path / "cache")
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


@pytest.mark.parametrize("commit", COMMITS)
def test_an_interrupted_warmup_is_not_continued_with_other_labels(
    unpacked: Unpacked, tmp_path: Path, commit: str
) -> None:
    cache = copied(unpacked(commit), "begun", tmp_path / "cache")
    write_mosaics(tmp_path / "images", 6)
    with pytest.raises(SourceError, match="was started with --labels auto, now classes"):
        build_cache(tmp_path / "images", cache, recipe_of(), jobs=1, labels="classes")


@pytest.mark.parametrize(("name", "count", "variants"), [("variants", 12, 1), ("samples", 16, 0)])
def test_a_cache_of_noise_is_added_to_with_the_same_records(
    tmp_path: Path, name: str, count: int, variants: int
) -> None:
    write_images(tmp_path / "images", count)
    cache = copied(DATA, "cache", tmp_path / "cache")
    manifest = build_cache(tmp_path / "images", cache, Recipe(size=32, variants=variants, augment="flip"), jobs=1)
    expected = json.loads((DATA / "expected.json").read_text())[name]
    assert {entry.name: entry.records_sha256 for entry in manifest.shards} == expected
    assert verify_cache(cache) == []


def test_a_cache_of_noise_is_read_and_verified(tmp_path: Path) -> None:
    images = write_images(tmp_path, 12)
    expected = np.stack([images[number].transpose(2, 0, 1) for number in in_order(12)])
    assert (pixels_of(DATA / "cache") == expected).all()
    assert list(CachedDataset(DATA / "cache").labels) == [number % 2 for number in in_order(12)]
    assert verify_cache(DATA / "cache") == []


@pytest.mark.parametrize("version", [0, 1, 9, 99, "6", None])
def test_a_version_that_no_commit_wrote_is_refused_with_a_remedy(
    unpacked: Unpacked, tmp_path: Path, version: object
) -> None:
    cache = copied(unpacked("8782811"), "raw", tmp_path / "cache")
    content = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps({**content, "version": version}))
    with pytest.raises(FormatError, match=f"version {version!r}, .*install the tpucache that wrote it, or build"):
        CachedDataset(cache)


@pytest.mark.parametrize(
    ("codec", "packing", "version"),
    [("dct-zstd", None, 3), ("dct-lz4", None, 3), ("dct-lz4", "sparse", 5), ("dct-zstd", "nibbles", 6)],
)
def test_a_packing_that_no_commit_wrote_is_refused_with_a_remedy(
    unpacked: Unpacked, tmp_path: Path, codec: str, packing: str | None, version: int
) -> None:
    cache = copied(unpacked("8782811"), codec, tmp_path / "cache")
    content = {**json.loads((cache / "manifest.json").read_text()), "version": version}
    del content["fields"][0]["packing"]
    if packing is not None:
        content["fields"][0]["packing"] = packing
    (cache / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(FormatError, match=f"no release wrote {packing!r}.* build it again"):
        CachedDataset(cache)
