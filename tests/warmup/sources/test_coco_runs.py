"""Run lengths in a table become masks in Kaggle's order, and follow their image like any mask."""

from __future__ import annotations

import csv
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import build_here
from numpy.testing import assert_array_equal
from PIL import Image

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader
from tpucache.loading.mixed import MixedLoader
from tpucache.recipe import Recipe
from tpucache.training.data import prepare_data
from tpucache.training.device import CpuDevice
from tpucache.training.settings import TrainSettings
from tpucache.warmup.records.masks import draw_runs
from tpucache.warmup.sources.columns import TableOptions
from tpucache.warmup.sources.table import TableSource, read_runs

Mask = npt.NDArray[np.uint8]


def encode_runs(mask: npt.NDArray[Any]) -> str:
    """Write a mask as the notebooks of Kaggle's competitions do."""
    flat = np.concatenate([[0], mask.T.flatten(), [0]])
    ends = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    ends[1::2] -= ends[::2]
    return " ".join(map(str, ends))


def write(folder: Path, rows: list[dict[str, str]], size: tuple[int, int] = (6, 4), turn: int = 1) -> Path:
    (folder / "source").mkdir()
    exif = Image.Exif()
    exif[0x0112] = turn
    for name in {row["ImageId"] for row in rows}:
        Image.new("RGB", size).save(folder / "source" / name, exif=exif)
    path = folder / "source" / "train.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def masks_of(folder: Path, path: Path, recipe: Recipe, **options: Any) -> Mask:
    source = TableSource(path, TableOptions(**{"rle_cols": ("EncodedPixels",), **options}))
    build_here(source, folder / "cache", recipe)
    dataset = CachedDataset(folder / "cache")
    return np.stack([dataset[number]["mask"].numpy()[..., 0] for number in range(len(dataset))])


@pytest.mark.slow
@given(st.integers(1, 9), st.integers(1, 9), st.data())
@settings(max_examples=60)
def test_what_is_written_as_on_kaggle_is_read_as_it_was(width: int, height: int, data: st.DataObject) -> None:
    bits = data.draw(st.lists(st.booleans(), min_size=width * height, max_size=width * height))
    mask = np.array(bits, np.uint8).reshape(height, width)
    runs = read_runs([(1, encode_runs(mask))], False, "a")
    assert_array_equal(draw_runs(runs, (width, height)), mask)
    text = encode_runs(mask).split()
    starts, lengths = np.array(text[::2], int) - 1, np.array(text[1::2], int)
    ends = np.concatenate([[0], (starts + lengths)[:-1]]) if len(starts) else starts
    relative = " ".join(f"{start - end} {length}" for start, end, length in zip(starts, ends, lengths, strict=True))
    assert_array_equal(read_runs([(1, relative)], True, "a"), runs)


@pytest.mark.parametrize("order", ["columns", "rows"])
@pytest.mark.parametrize("size", [(40, 30), (30, 40), (44, 36)])
def test_run_lengths_count_down_the_columns_or_along_the_rows(
    tmp_path: Path, order: str, size: tuple[int, int]
) -> None:
    width, height = size
    row, column = np.mgrid[:height, :width]
    mask = ((row - 14) ** 2 + (column - 16) ** 2 < 100).astype(np.uint8)
    text = encode_runs(mask if order == "columns" else mask.T)
    path = write(tmp_path, [{"ImageId": "a.png", "EncodedPixels": text}], size)
    recipe = Recipe(size=(height, width))
    assert_array_equal(masks_of(tmp_path, path, recipe, rle_order=order)[0], mask)
    shutil.rmtree(tmp_path / "cache")
    if order == "rows":
        with pytest.raises(SourceError, match=r"counted along the rows.*--rle-order rows"):
            masks_of(tmp_path, path, recipe)
    else:
        assert_array_equal(masks_of(tmp_path, path, recipe)[0], mask)


def test_another_order_of_run_lengths_is_another_content(tmp_path: Path) -> None:
    path = write(tmp_path, [{"ImageId": "a.png", "EncodedPixels": "1 2"}])
    masks_of(tmp_path, path, Recipe(size=(4, 6)))
    masks_of(tmp_path, path, Recipe(size=(4, 6)), rle_order="columns")  # the same content
    with pytest.raises(SourceError, match="another content"):
        masks_of(tmp_path, path, Recipe(size=(4, 6)), rle_order="rows")


def test_rows_of_one_image_are_one_sample_with_a_class_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"ImageId": "a.png", "ClassId": "3", "EncodedPixels": "1 2", "age": "7", "note": "x"},
        {"ImageId": "b.png", "ClassId": "1", "EncodedPixels": "", "age": "8", "note": "z"},
        {"ImageId": "a.png", "ClassId": "1", "EncodedPixels": "23 2 5 1", "age": "7", "note": "y"},
    ]
    with caplog.at_level(logging.WARNING):
        masks = masks_of(tmp_path, write(tmp_path, rows), Recipe(size=(4, 6)), rle_class_col="ClassId")
    expected = np.zeros((2, 6, 4), np.uint8)
    expected[0].reshape(-1)[[0, 1]] = 3
    expected[0].reshape(-1)[[22, 23, 4]] = 1
    assert_array_equal(masks, expected.transpose(0, 2, 1))
    table = CachedDataset(tmp_path / "cache").table
    assert (list(table.paths), np.asarray(table["age"]).tolist(), "note" in table) == (
        ["a.png", "b.png"],
        [7, 8],
        False,
    )
    assert "leaving out columns that differ within an image: note" in caplog.text


def test_several_columns_are_a_class_each_and_names_are_numbered_in_their_order(tmp_path: Path) -> None:
    rows = [{"ImageId": "a.png", "fish": "1 1", "flower": "3 1"}]
    masks = masks_of(tmp_path, write(tmp_path, rows), Recipe(size=(4, 6)), rle_cols=("flower", "fish"))
    assert masks[0].T.reshape(-1)[:4].tolist() == [2, 0, 1, 0]
    named = [
        {"ImageId": "a.png", "class": name, "EncodedPixels": pixels} for name, pixels in (("b", "1 1"), ("a", "3 1"))
    ]
    (tmp_path / "named").mkdir()
    masks = masks_of(tmp_path / "named", write(tmp_path / "named", named), Recipe(size=(4, 6)), rle_class_col="class")
    assert masks[0].T.reshape(-1)[:4].tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize(("numbers", "nothing"), [("12", ""), (("1.0", "2.0"), "nan"), ("ab", " ")])
def test_a_row_without_masks_and_without_a_class_changes_no_number_of_a_class(
    numbers: Sequence[str], nothing: str, tmp_path: Path
) -> None:
    cells = [("a.png", numbers[0], "1 1"), ("a.png", numbers[1], "3 1"), ("b.png", nothing, "")]
    rows = [{"ImageId": name, "class": number, "EncodedPixels": runs} for name, number, runs in cells]
    masks = masks_of(tmp_path, write(tmp_path, rows), Recipe(size=(4, 6)), rle_class_col="class")
    assert masks[0].T.reshape(-1)[:4].tolist() == [1, 0, 2, 0]
    assert not masks[1].any()
    rows[2]["EncodedPixels"] = "1 1"
    (tmp_path / "other").mkdir()
    with pytest.raises(SourceError, match=r"line 4, column 'class': .* is no class, and the row has run lengths"):
        masks_of(tmp_path, write(tmp_path / "other", rows), Recipe(size=(4, 6)), rle_class_col="class")


def test_masks_lie_on_the_image_that_is_stated(tmp_path: Path) -> None:
    rows = [{"ImageId": "a.jpg", "EncodedPixels": "1 1"}]  # the corner at the top left
    path = write(tmp_path, rows, turn=6)  # a quarter turn to the right
    with pytest.raises(
        SampleError, match=r"an EXIF orientation, which its annotations may follow or not; give --coordinates displayed"
    ):
        masks_of(tmp_path, path, Recipe(size=(6, 4)))
    for coordinates, corner in (("displayed", (0, 0)), ("stored", (0, 3))):
        folder = tmp_path / coordinates
        masks = masks_of(folder, path, Recipe(size=(6, 4), coordinates=coordinates))
        assert np.argwhere(masks[0]).tolist() == [list(corner)]


@pytest.mark.slow
def test_a_cell_of_any_length_is_read(tmp_path: Path) -> None:
    mask = np.zeros((300, 400), np.uint8)
    mask[::2] = 1
    rows = [{"ImageId": "a.png", "EncodedPixels": encode_runs(mask)}]
    assert len(rows[0]["EncodedPixels"]) > csv.field_size_limit()
    found = masks_of(tmp_path, write(tmp_path, rows, (400, 300)), Recipe(size=(300, 400)))
    assert_array_equal(found[0], mask)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 2 3", "not pairs"),
        ("1 0", "both from 1"),
        ("a b", "not whole numbers"),
        ("1.5 2", "not whole numbers"),
        ("0 2", "begin before the first pixel"),
        ("24 2", "end at pixel 25, and the image has 6 x 4 = 24"),
        ("9223372036854775807 1", "run lengths"),
        ("99999999999999999999 1", "not whole numbers"),
    ],
)
def test_what_are_no_run_lengths_of_the_image_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path, [{"ImageId": "a.png", "EncodedPixels": text}])
    with pytest.raises(SourceError, match=reason):
        masks_of(tmp_path, path, Recipe(size=(4, 6)))


def test_labels_that_differ_within_an_image_and_classes_beyond_255_are_refused(tmp_path: Path) -> None:
    rows = [{"ImageId": "a.png", "label": label, "c": "256", "EncodedPixels": "1 1"} for label in "xy"]
    path = write(tmp_path, rows)
    with pytest.raises(SourceError, match="rows of the same image differ in column 'label'"):
        masks_of(tmp_path, path, Recipe(), label_cols=("label",))
    with pytest.raises(SourceError, match=r"classes of masks are 1 to 255.*not 256 to 256"):
        masks_of(tmp_path, path, Recipe(), rle_class_col="c")


def test_the_names_of_classes_are_kept_and_a_number_never_gets_another_name(tmp_path: Path) -> None:
    def rows(names: str) -> list[dict[str, str]]:
        return [{"ImageId": f"{number}.png", "EncodedPixels": "1 2", "kind": name} for number, name in enumerate(names)]

    caches: dict[str, CachedDataset] = {}
    for names in ("abc", "ac", "ab", "12"):
        folder = tmp_path / names
        folder.mkdir()
        masks_of(folder, write(folder, rows(names)), Recipe(size=6), rle_class_col="kind")
        caches[names] = CachedDataset(folder / "cache")
    assert [each.manifest.mask_names for each in caches.values()] == [tuple("abc"), ("a", "c"), ("a", "b"), ()]
    settings = TrainSettings(epochs=1, batch_size=1, mask_classes=4, precision="float32")
    loaders = {name: CachedLoader(dataset, 1) for name, dataset in caches.items()}
    for name in ("abc", "ab", "12"):
        prepare_data(settings, caches["abc"], caches[name], CpuDevice())
        MixedLoader([loaders["abc"], loaders[name]], [1, 1])
    with pytest.raises(UsageError, match="class 2 is 'c', not 'b': write the numbers"):
        prepare_data(settings, caches["abc"], caches["ac"], CpuDevice())
    with pytest.raises(UsageError, match="class 2 is 'c', not 'b': write the numbers"):
        MixedLoader([loaders["abc"], loaders["ac"]], [1, 1])
    (tmp_path / "ac" / "source" / "2.png").write_bytes((tmp_path / "ac" / "source" / "0.png").read_bytes())
    text = (tmp_path / "ac" / "source" / "train.csv").read_text() + "2.png,1 2,b\n"
    (tmp_path / "ac" / "source" / "train.csv").write_text(text)
    with pytest.raises(SourceError, match="class 2 is 'b', not 'c'"):
        masks_of(tmp_path / "ac", tmp_path / "ac" / "source" / "train.csv", Recipe(size=6), rle_class_col="kind")
