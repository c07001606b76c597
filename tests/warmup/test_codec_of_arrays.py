"""Arrays are stored in the codec that is asked for, or it is refused; messages name their source."""

from __future__ import annotations

import numpy as np
import pytest
from made import Made, build_here

from tpucache import CachedDataset, CachedLoader, Recipe, RecipeError, verify_cache
from tpucache.warmup.records.arrays import record_fields
from tpucache.warmup.sources import open_source
from tpucache.warmup.sources.source import Item, source_name


class Rows:
    classes = ("even", "odd")

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {
            "waves": np.arange(3000, dtype=np.float32) // 100 + number,
            "at": np.int64([number, 7]),
            "label": number % 2,
        }


def test_arrays_are_stored_in_zstd_where_that_is_asked_for_and_raw_else(tmp_path):
    sizes = {}
    for codec, quality in (("raw", None), ("zstd", None), ("zstd", 19)):
        directory = tmp_path / f"{codec}-{quality}"
        manifest = build_here(Rows(), directory, Recipe(codec=codec, quality=quality))
        assert {field.codec for field in manifest.fields} == {codec}
        dataset = CachedDataset(directory)
        for number in (0, 63):
            assert np.array_equal(dataset[number]["waves"], Rows()[number]["waves"])
            assert dataset[number]["at"].tolist() == [number, 7]
        batch = next(iter(CachedLoader(dataset, 64)))
        assert np.array_equal(batch["waves"][5], Rows()[5]["waves"])
        assert verify_cache(directory) == []
        sizes[codec, quality] = manifest.total_bytes
    assert sizes["zstd", None] < sizes["raw", None] / 3


def test_arrays_beside_an_image_are_stored_as_it_is_where_nothing_is_lost():
    item = Item({"image": np.zeros((8, 8, 3), np.uint8), "depth": np.zeros(9, np.float32)})
    found = {codec: record_fields(item, Recipe(size=8, codec=codec))[1].codec for codec in ("raw", "jpeg", "zstd")}
    assert found == {"raw": "raw", "jpeg": "raw", "zstd": "zstd"}


@pytest.mark.parametrize("codec", ["jpeg", "png", "yuv420", "dct-lz4"])
def test_codecs_of_images_are_refused_for_arrays_before_anything_is_built(tmp_path, codec):
    with pytest.raises(RecipeError, match=f"--codec {codec} needs images, and the Rows has none: .* raw or zstd"):
        build_here(Rows(), tmp_path / "cache", Recipe(codec=codec))
    assert not (tmp_path / "cache").exists()


class OwnSource(Made):
    __repr__ = object.__repr__


@pytest.mark.parametrize("source", [Rows(), OwnSource(1, lambda _: Item({"waves": np.zeros(4, np.float32)}))])
def test_a_message_about_a_source_shows_its_name_and_no_address(tmp_path, source):
    with pytest.raises(RecipeError) as caught:
        build_here(source, tmp_path / "cache", Recipe(variants=2))
    assert f"variants need images, and the {type(source).__name__} has none" in str(caught.value)
    assert " object at 0x" not in str(caught.value)


def test_every_source_is_called_by_its_place(tmp_path):
    for text in ("photos", "photos.csv", "photos.zip", "photos.parquet", "photos.tfrec"):
        (tmp_path / text).mkdir() if "." not in text else (tmp_path / text).touch()
        assert str(tmp_path / text) in source_name(open_source(tmp_path / text))
    assert source_name(open_source("somewhere:make")) == "somewhere:make"
