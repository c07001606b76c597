"""Grey images have one channel, and images that are kept have the channels and numbers of their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from made import build_here, write_rows
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

from tpucache.errors import RecipeError, SampleError, SourceError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.format import VERSION
from tpucache.store.manifest import Manifest
from tpucache.warmup import TableOptions, TableSource

Array = npt.NDArray[Any]
SIDE = 8
MAKERS: dict[str, Callable[[np.random.Generator], Array]] = {
    "uint16": lambda rng: rng.integers(0, 65536, (SIDE, SIDE)).astype(np.uint16),
    "int16": lambda rng: rng.integers(-2000, 3000, (SIDE, SIDE, 2)).astype(np.int16),
    "float32": lambda rng: rng.normal(0, 9, (SIDE, SIDE, 16)).astype(np.float32),
    "uint8": lambda rng: rng.integers(0, 256, (SIDE, SIDE, 5)).astype(np.uint8),
}


def write_arrays(folder: Path, kind: str, count: int = 6) -> list[Array]:
    rng = np.random.default_rng(5)
    arrays = []
    for number in range(count):
        array = MAKERS[kind](rng)
        path = folder / f"{'ab'[number % 2]}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "uint16":
            Image.fromarray(array).save(path)
        else:
            np.save(path.with_suffix(".npy"), array)
        arrays.append(array.reshape(SIDE, SIDE, -1))
    return [*arrays[::2], *arrays[1::2]]  # class by class


def _keep(folder: Path) -> Manifest:
    return build_here(folder / "source", folder / "cache", Recipe(size=SIDE, mode="keep"))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("kind", MAKERS)
def test_images_of_the_size_are_kept_bit_for_bit(kind: str, codec: str, tmp_path: Path) -> None:
    arrays = write_arrays(tmp_path / "source", kind)
    recipe = Recipe(size=SIDE, mode="keep", codec=codec)
    manifest = build_here(tmp_path / "source", tmp_path / "cache", recipe)
    assert manifest.version == VERSION
    assert manifest.fields[0].dtype == arrays[0].dtype.str
    dataset = CachedDataset(tmp_path / "cache")
    found = np.stack([image.numpy() for image, _ in (dataset[number] for number in range(len(dataset)))])
    assert_array_equal(found, np.stack(arrays).transpose(0, 3, 1, 2))
    (batch, _), *_ = CachedLoader(dataset, len(dataset))
    assert_array_equal(batch.numpy(), found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_statistics_are_of_the_numbers_and_stay_exact_when_samples_are_added(kind: str, tmp_path: Path) -> None:
    recipe = Recipe(size=SIDE, mode="keep")
    write_arrays(tmp_path / "source", kind, 4)
    build_here(tmp_path / "source", tmp_path / "cache", recipe)
    images = np.stack(write_arrays(tmp_path / "source", kind, 6)).astype(np.float64)
    added = build_here(tmp_path / "source", tmp_path / "cache", recipe).statistics
    assert_allclose(added.mean, images.mean((0, 1, 2)), rtol=1e-9)
    assert_allclose(added.std, images.std((0, 1, 2)), rtol=1e-9)
    assert added == build_here(tmp_path / "source", tmp_path / "anew", recipe).statistics
    assert Manifest.load(tmp_path / "cache").statistics == added


def test_grey_is_the_luma_in_one_channel(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    (tmp_path / "source").mkdir()
    Image.fromarray(colours).save(tmp_path / "source" / "a.png")
    Image.fromarray(colours).convert("RGBA").save(tmp_path / "source" / "b.png")
    Image.fromarray(colours[..., 0]).save(tmp_path / "source" / "c.png")
    manifest = build_here(tmp_path / "source", tmp_path / "cache", Recipe(size=SIDE, mode="grey", codec="png"))
    assert (manifest.version, manifest.fields[0].shape) == (VERSION, (SIDE, SIDE, 1))
    assert len(manifest.statistics.mean) == 1
    luma = np.asarray(Image.fromarray(colours).convert("L"))
    images = [image.numpy()[0] for image, _ in (CachedDataset(tmp_path / "cache")[i] for i in range(3))]
    for image, expected in zip(images, (luma, luma, colours[..., 0]), strict=True):
        assert_array_equal(image, expected)


def test_presets_move_pixels_of_any_depth_and_change_no_colours(tmp_path: Path) -> None:
    arrays = write_arrays(tmp_path / "source", "uint16")
    recipe = Recipe(size=SIDE, mode="keep", variants=1, augment="strong")
    manifest = build_here(tmp_path / "source", tmp_path / "cache", recipe)
    assert "ColorJitter" not in json.dumps(manifest.recipe["augmentation"])
    image, _ = CachedDataset(tmp_path / "cache", variant=1)[0]
    assert image.numpy().dtype == np.uint16
    assert not np.array_equal(image.numpy()[0], arrays[0][..., 0])


@pytest.mark.parametrize("name", ["deep.png", "colours.png"])
def test_an_image_of_another_kind_is_refused_by_name(name: str, tmp_path: Path) -> None:
    write_arrays(tmp_path / "source", "uint16")
    other = np.zeros((SIDE, SIDE, 3), np.uint8) if name == "colours.png" else np.zeros((SIDE, SIDE), np.uint8)
    Image.fromarray(other).save(tmp_path / "source" / "b" / name)
    with pytest.raises(SampleError, match=f"{name}.*its image is uint8 .*in other samples uint16 with 1.*--mode rgb"):
        build_here(tmp_path / "source", tmp_path / "cache", Recipe(size=SIDE, mode="keep"))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((SIDE, SIDE)), "are float64: --mode keep takes uint8, uint16, int16, float32"),
        (np.full((SIDE, SIDE), np.nan, np.float32), "not finite"),
        (np.zeros((SIDE, SIDE, 17), np.uint8), None),
        (np.zeros((20, 20, 20), np.uint8), "1 to 16 channels"),
        (np.array([{}]), "does not decode as .npy"),
        (np.zeros(4), "an image is"),
    ],
    ids=["float64", "nan", "17 channels of 8 rows", "20 channels", "pickle", "one dimension"],
)
def test_arrays_that_cannot_be_kept_are_refused(array: Any, reason: str | None, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    np.save(tmp_path / "source" / "a.npy", array)
    if reason is None:  # (8, 8, 17) can only be 8 channels of 8 x 17 pixels
        assert _keep(tmp_path).fields[0].shape[2] == 8
        return
    with pytest.raises(SourceError, match=reason):
        _keep(tmp_path)


def test_an_npy_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "source" / "a.npy"
    whole.parent.mkdir()
    np.save(whole, MAKERS["uint8"](np.random.default_rng(0)))
    data = whole.read_bytes()
    for cut in (1, 7, 20, 100, 128, len(data) - 1):
        whole.write_bytes(data[:cut])
        with pytest.raises(SourceError, match="none of the 1 samples"):
            _keep(tmp_path)


@pytest.mark.parametrize("codec", ["jpeg", "png", "yuv420", "dct-zstd", "dct-lz4"])
def test_codecs_of_8_bit_pictures_are_refused_where_numbers_are_kept(codec: str) -> None:
    with pytest.raises(RecipeError, match="codec is raw or zstd for the mode keep"):
        Recipe(mode="keep", codec=codec)


def test_the_limit_of_pixels_is_an_option_and_changes_no_record(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    Image.new("L", (40, 30)).save(tmp_path / "source" / "a.png")
    with pytest.raises(SampleError, match="40 x 30 are more than --max-pixels 1199"):
        build_here(tmp_path / "source", tmp_path / "cache", Recipe(size=SIDE, max_pixels=1199))
    build_here(tmp_path / "source", tmp_path / "cache", Recipe(size=SIDE, max_pixels=1200))
    build_here(tmp_path / "source", tmp_path / "cache", Recipe(size=SIDE))  # finished: returned as it is


def test_a_limit_above_pillows_own_is_kept_to_and_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    (tmp_path / "source").mkdir()
    Image.new("L", (40, 30)).save(tmp_path / "source" / "a.png")
    with pytest.raises(SampleError, match=r"too many pixels.*--max-pixels"):
        build_here(tmp_path / "source", tmp_path / "cache", Recipe(size=SIDE))
    build_here(tmp_path / "source", tmp_path / "cache", Recipe(size=SIDE, max_pixels=1200))
    assert Image.MAX_IMAGE_PIXELS == 100


def test_files_of_several_frames_are_counted_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "photos").mkdir()
    frames = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (0, 200)]
    for suffix in ("gif", "tiff", "webp", "png"):
        frames[0].save(tmp_path / "photos" / f"more.{suffix}", save_all=True, append_images=frames[1:])
        frames[0].save(tmp_path / "photos" / f"one.{suffix}")
    build_here(tmp_path / "photos", tmp_path / "cache")
    (line,) = [record.getMessage() for record in caplog.records if "several frames" in record.getMessage()]
    assert line.endswith("only the first one is used: 4 files, such as 'more.gif'")
    cache = Cache.open(tmp_path / "cache")
    assert "(several frames)" not in cache.samples
    assert sorted({*cache.samples["image_type"]}) == ["gif", "png", "tiff", "webp"]


@pytest.mark.parametrize("suffix", ["gif", "tiff"])
def test_masks_of_several_frames_are_counted_in_the_same_warning(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frames = [Image.new("L", (8, 8), level) for level in (1, 2)]
    for name, more in (("one", []), ("more", frames[1:])):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
        frames[0].save(tmp_path / f"{name}_mask.{suffix}", save_all=True, append_images=more)
    rows = [f"{name}.png,{name}_mask.{suffix}" for name in ("one", "more")]
    write_rows(tmp_path / "table.csv", "path,mask", *rows)
    source = TableSource(tmp_path / "table.csv", TableOptions(mask_col="mask"))
    build_here(source, tmp_path / "cache", Recipe(size=8, mask_values="keep"))
    (line,) = [record.getMessage() for record in caplog.records if "several frames" in record.getMessage()]
    assert line.endswith("only the first one is used: 1 files, such as 'more.png'")
