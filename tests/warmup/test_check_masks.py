"""Masks that are pictures are refused before anything is built, unless it is said what their numbers are."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from made import build_here
from PIL import Image
from slow_answers import SlowAnswers

from tpucache import CachedDataset, Recipe, RecipeError
from tpucache.warmup import TableOptions, TableSource
from tpucache.warmup.listing import check_masks
from tpucache.warmup.sources.source import Item, Listing, Sample


class Masked:
    def __init__(self, *values: list[int]) -> None:
        self.values = values

    def listing(self) -> Listing:
        return Listing([Sample(number, str(number)) for number in range(len(self.values))])

    def load(self, sample: Sample) -> Item:
        mask = np.array([self.values[int(sample.path)]], np.uint8)
        return Item({"image": np.zeros((1, len(mask[0]), 3), np.uint8), "mask": mask})


def check(*values: list[int]) -> None:
    source = Masked(*values)
    check_masks(source, source.listing(), Recipe())  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [[[0, 255]], [[255]], [[0], [0, 255], [255]], [[0]] * 100 + [[0, 255]] * 60])
def test_masks_of_black_and_white_are_refused(values: list[list[int]]) -> None:
    with pytest.raises(RecipeError, match=r"255 alone.*--mask-values scale.*--mask-values keep"):
        check(*values)


@pytest.mark.parametrize("values", [[0, 85, 170, 255], [0, 127, 255], [0, 64, 128, 192, 255]])
def test_masks_of_levels_of_grey_are_refused(values: list[int]) -> None:
    with pytest.raises(RecipeError, match="levels of grey, 0, "):
        check(values, values[:2])


def test_masks_of_more_numbers_than_there_are_classes_are_refused() -> None:
    with pytest.raises(RecipeError, match="up to 256 different numbers"):
        check([*range(256)])


@pytest.mark.parametrize(
    "values",
    [
        [[0, 1]],
        [[0]],
        [[0, 255], [0, 1, 255]],
        [[0, 17]],
        [[7, 8, 11, 255], [0, 3, 33]],
        [[*range(150), 255][1:]],
        [[0, 200]],
    ],
)
def test_masks_that_may_be_numbers_of_classes_are_not_refused(values: list[list[int]]) -> None:
    check(*values)


@pytest.mark.slow
def test_what_is_said_of_masks_is_what_they_are_taken_for(tmp_path: Path) -> None:
    Image.new("RGB", (4, 2)).save(tmp_path / "a.png")
    Image.fromarray(np.repeat([(0, 255)], 2, 0).repeat(2, 1).astype(np.uint8)).save(tmp_path / "mask.png")
    (tmp_path / "t.csv").write_text("path,mask\na.png,mask.png\n")

    def build(name: str, **recipe: str) -> set[int]:
        source = TableSource(tmp_path / "t.csv", TableOptions(mask_col="mask"))
        build_here(source, tmp_path / name, Recipe(size=(2, 4), **recipe))  # type: ignore[arg-type]
        return {*CachedDataset(tmp_path / name)[0]["mask"].flatten().tolist()}

    with pytest.raises(RecipeError, match="the mask that was looked at holds 0 and 255 alone"):
        build("undecided")
    assert not (tmp_path / "undecided" / "manifest.json").exists()
    assert build("kept", mask_values="keep") == {0, 255}
    assert build("scaled", mask_values="scale") == {0, 1}
    assert build("kept") == {0, 255}  # a cache that is there is not judged again


def test_what_is_refused_is_no_part_of_what_records_are() -> None:
    assert Recipe().to_dict() == Recipe(mask_values="keep").to_dict()


def test_palettes_of_greys_are_refused_unless_it_is_said_what_they_are(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 2, (8, 8), np.uint8)
    mask = Image.frombytes("P", (8, 8), pixels.tobytes())
    mask.putpalette([255, 255, 255, 0, 0, 0])
    mask.save(tmp_path / "mask.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    (tmp_path / "table.csv").write_text("path,mask\nimage.png,mask.png\n")
    source = TableSource(tmp_path / "table.csv", TableOptions(mask_col="mask"))
    with pytest.raises(RecipeError, match=r"mask of image\.png is a palette image of greys.*scale.*colours.*keep"):
        build_here(source, tmp_path / "cache")
    for values, expected in (("scale", 1 - pixels), ("keep", pixels)):
        cache = tmp_path / values
        build_here(source, cache, Recipe(size=8, mask_values=values))
        np.testing.assert_array_equal(np.asarray(CachedDataset(cache)[0]["mask"]).reshape(8, 8), expected)


def test_a_palette_of_greys_is_refused_in_a_mask_that_only_max_pixels_lets_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = Image.fromarray(np.array([[0, 1, 1, 0]], np.uint8), "P")
    image.putpalette([255, 255, 255, 0, 0, 0])
    file = io.BytesIO()
    image.save(file, "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3)
    source = Masked([0])
    monkeypatch.setattr(source, "load", lambda _sample: Item({"mask": file.getvalue()}))
    with pytest.raises(RecipeError, match="a palette image of greys"):
        check_masks(source, source.listing(), Recipe(max_pixels=4))  # type: ignore[arg-type]


def test_on_late_storage_masks_are_read_at_once_and_judged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowAnswers(Masked.load)
    monkeypatch.setattr(Masked, "load", slow)
    monkeypatch.setattr(Masked, "loads_in_threads", True, raising=False)
    check(*[[0, 1, 255]] * 60)
    assert slow.most > 2
    with pytest.raises(RecipeError, match="32 masks that were looked at hold 0 and 255 alone"):
        check(*[[0, 255]] * 60)
