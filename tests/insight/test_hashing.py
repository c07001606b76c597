"""hashes: of each clean image, the same everywhere, kept in the cache's folder and never trusted."""

from __future__ import annotations

import contextlib
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from disk import SmallDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from photographs import picture

from tpucache import CachedDataset, build_cache
from tpucache.errors import UsageError
from tpucache.insight import Hashes, hashes, pairs
from tpucache.insight.hashing import grey_grids, phash
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.hashes import hashes_name, kept_hashes
from tpucache.store.samples import encode_columns
from tpucache.warmup.sources.source import Item, Listing, Sample

GOLDEN = "fb6f5554e2ef558c"


class Arrays:
    """A source of arrays."""

    def __init__(self, arrays: list[np.ndarray], name: str = "image") -> None:
        self.arrays, self.name = arrays, name

    def list(self) -> Listing:
        return Listing([Sample(number, f"{number}") for number in range(len(self.arrays))])

    def load(self, sample: Sample) -> Item:
        return Item({self.name: self.arrays[sample.number]})


def copied(cache: Path, folder: Path) -> Path:
    """Return a copy of a cache that may be written to, without hashes."""
    return Path(shutil.copytree(cache, folder / "copy", ignore=shutil.ignore_patterns("hashes-*")))


def columns_of(found: Hashes) -> dict[str, np.ndarray]:
    """Return the columns of a file of hashes."""
    names = ("number", "phash256", "phash256_mirrored", "is_blank")
    return dict(zip(names, (found.numbers, found.words, found.mirrored, found.is_blank), strict=True))


def assert_equal(one: Hashes, two: Hashes) -> None:
    for name, column in columns_of(one).items():
        assert np.array_equal(column, columns_of(two)[name]), name


@settings(max_examples=30)
@given(st.integers(1, 400), st.integers(1, 90), st.sampled_from([1, 3, 4]), st.integers(0, 9))
def test_a_grid_has_the_means_of_its_parts(height: int, width: int, channels: int, seed: int) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (2, height, width, channels), np.uint8)
    weights = np.array([77, 150, 29]) / 256 if channels == 3 else np.full(channels, 1 / channels)
    exact = np.repeat(np.repeat(images @ weights, 32, 1), 32, 2).reshape(2, 32, height, 32, width).mean((2, 4))
    assert np.abs(grey_grids(images) - exact).max() < 0.05


def test_a_mirrored_hash_is_that_of_the_mirrored_image() -> None:
    images = np.stack([picture(seed) for seed in range(8)])
    words, mirrored = phash(grey_grids(images))
    turned, back = phash(grey_grids(images[:, :, ::-1]))
    assert np.array_equal(mirrored, turned)
    assert np.array_equal(words, back)


def test_a_hash_stays_the_same_from_version_to_version() -> None:
    ramp = (np.arange(96)[:, None] * 3 + np.arange(96)[None] ** 2 // 29) % 251
    images = np.stack([ramp, ramp[::-1], ramp.T], -1).astype(np.uint8)[None]
    assert f"{int(np.bitwise_xor.reduce(phash(grey_grids(images))[0][0])):016x}" == GOLDEN


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_images_of_any_depth_and_channels_have_hashes(tmp_path: Path, dtype: str, channels: int) -> None:
    grey = [picture(seed).mean(2, keepdims=True) for seed in (1, 1, 2)]
    grey[1] = grey[1][:, ::-1]
    scale, base = {"uint8": (1, 0), "uint16": (16, 0), "int16": (10, -1000), "float32": (1e-3, -0.2)}[dtype]
    arrays = [np.repeat(image * scale + base, channels, 2).astype(dtype) for image in grey]
    arrays.append(np.full_like(arrays[0], base))
    build_cache(Arrays(arrays), tmp_path / "cache", Recipe(size=64, mode="keep"), jobs=1)
    found = hashes(tmp_path / "cache")
    assert found.is_blank.tolist() == [False, False, False, True]
    near = pairs(found)
    assert (near.first.tolist(), near.second.tolist(), near.is_mirrored.tolist()) == ([0], [1], [True])
    assert near.blank == 1


def test_values_that_are_not_finite_do_no_harm() -> None:
    images = np.full((2, 40, 40, 1), np.nan, np.float32)
    images[1, :20] = np.inf
    assert np.isfinite(grey_grids(images)).all()


@pytest.mark.parametrize("codec", ["jpeg", "yuv420", "dct-zstd", "dct-lz4", "zstd"])
def test_a_codec_changes_few_bits(tmp_path: Path, codec: str) -> None:
    arrays = [picture(seed) for seed in range(3)]
    for name, folder in (("raw", "raw"), (codec, "other")):
        build_cache(Arrays(arrays), tmp_path / folder, Recipe(size=64, codec=name), jobs=1)
    found = pairs(hashes(tmp_path / "raw"), 15, other=hashes(tmp_path / "other"))
    assert sorted(zip(found.first.tolist(), found.second.tolist(), strict=True)) == [(0, 0), (1, 1), (2, 2)]


def test_records_without_images_are_refused(tmp_path: Path) -> None:
    tokens = [np.arange(8, dtype=np.int32)] * 3
    build_cache(Arrays(tokens, "tokens"), tmp_path / "cache", Recipe(size=16), jobs=1)
    with pytest.raises(UsageError, match="no images to hash, only the fields tokens"):
        hashes(tmp_path / "cache")


def test_hashes_are_the_same_for_any_number_of_threads(tmp_path: Path) -> None:
    arrays = [picture(seed, side=400) for seed in range(7)]  # of which a few make a batch
    build_cache(Arrays(arrays), tmp_path / "cache", Recipe(size=400), jobs=1)
    one, *others = (hashes(tmp_path / "cache", threads=threads, keep=False) for threads in (1, 2, 5))
    assert all(np.array_equal(one.words, other.words) for other in others)
    assert np.array_equal(one.words, phash(grey_grids(np.stack(arrays)))[0])
    seen: list[tuple[int, int]] = []
    hashes(tmp_path / "cache", keep=False, on_progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 2
    assert seen == sorted({*seen})
    assert seen[-1] == (7, 7)


def test_a_selection_has_the_hashes_of_its_samples(copies: Path, tmp_path: Path) -> None:
    cache = copied(copies, tmp_path)
    dataset, whole = CachedDataset(cache), hashes(cache, keep=False)
    part = dataset.select([7, 3, 3])
    assert np.array_equal(hashes(part).words, whole.words[[7, 3, 3]])
    assert kept_hashes(Cache.open(cache)) is None, "only those of all samples are kept"
    hashes(dataset)
    assert np.array_equal(hashes(part).words, whole.words[[7, 3, 3]])


def test_hashes_are_kept_once_and_read_again(copies: Path, tmp_path: Path) -> None:
    cache = copied(copies, tmp_path)
    (cache / f"hashes-{'0' * 64}.npz").write_bytes(b"of other records")
    first = hashes(cache)
    (path,) = cache.glob("hashes-*")
    assert path.name == hashes_name(Cache.open(cache).manifest)
    assert_equal(hashes(cache), first)
    other = replace(first, words=~first.words)  # what nobody would compute
    path.write_bytes(encode_columns(columns_of(other)))
    assert_equal(hashes(cache), other)


def test_a_folder_that_cannot_be_written_is_left_as_it_is(
    copies: Path, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.mount("size=4m")
    cache = copied(copies, disk.path)
    with (disk.path / "rest").open("wb", 0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    names = sorted(path.name for path in cache.iterdir())
    with caplog.at_level(logging.WARNING):
        assert len(hashes(cache)) == 24
    assert "No space left" in caplog.text
    caplog.clear()
    disk.mount("remount", "ro")
    assert len(hashes(cache)) == 24
    assert not caplog.text
    assert sorted(path.name for path in cache.iterdir()) == names


@pytest.mark.parametrize(
    "damage",
    [
        lambda data, columns: data[: len(data) // 2],
        lambda data, columns: b"PK\x03\x04 no archive",
        lambda data, columns: encode_columns({**columns, "number": columns["number"] + np.uint64(1)}),
        lambda data, columns: encode_columns({**columns, "phash256": columns["phash256"][:, :2]}),
        lambda data, columns: encode_columns({**columns, "phash256": columns["phash256"].astype(np.float64)}),
        lambda data, columns: encode_columns({name: each for name, each in columns.items() if name != "is_blank"}),
        lambda data, columns: encode_columns({name: each[:5] for name, each in columns.items()}),
    ],
)
def test_a_damaged_file_of_hashes_is_not_used_and_written_anew(
    copies: Path, tmp_path: Path, damage, caplog: pytest.LogCaptureFixture
) -> None:
    cache = copied(copies, tmp_path)
    whole = hashes(cache)
    path = cache / hashes_name(Cache.open(cache).manifest)
    columns = columns_of(whole)
    path.write_bytes(damage(path.read_bytes(), columns))
    with caplog.at_level(logging.WARNING):
        found = hashes(cache)
    assert "is not used, and its hashes are computed again" in caplog.text
    assert np.array_equal(found.words, whole.words)
    assert kept_hashes(Cache.open(cache)) is not None
