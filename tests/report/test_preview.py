"""The contact sheet."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tpucache import TpucacheError, UsageError, preview_cache
from tpucache.report.draw import draw_record
from tpucache.report.preview import save_picture
from tpucache.report.records import Records


def contains(sheet, picture):
    """Return whether a picture is somewhere in a sheet, pixel by pixel."""
    whole, part = np.asarray(sheet), np.asarray(picture)
    height, width = part.shape[:2]
    ys, xs = np.nonzero((whole[: len(whole) - height + 1, : whole.shape[1] - width + 1] == part[0, 0]).all(axis=-1))
    return any(np.array_equal(whole[y : y + height, x : x + width], part) for y, x in zip(ys, xs, strict=True))


def test_every_variant_of_every_sample_is_on_the_sheet(plain):
    sheet = preview_cache(plain, 3, side=60)
    records = Records(plain)
    for position in records.choose(3):
        for variant in (0, 1, 2):
            picture = draw_record(records.read(position, variant), records.manifest.classes, 60)
            assert contains(sheet, picture)
    hidden = next(position for position in range(12) if position not in records.choose(3))
    assert not contains(sheet, draw_record(records.read(hidden, 0), (), 60))


@pytest.mark.parametrize("codec", ["raw", "jpeg", "png", "zstd"])
def test_masks_boxes_and_keypoints_are_drawn_in_any_codec(codec, drawn_cache, tmp_path):
    sheet = preview_cache(drawn_cache(tmp_path / "cache", codec), 2, side=120)
    assert sheet.height > 200


def test_variants_are_limited(plain):
    assert preview_cache(plain, 1, variants=2, side=300).width < preview_cache(plain, 1, side=300).width


def test_a_sheet_is_the_same_for_the_same_seed(plain):
    assert preview_cache(plain, 4).tobytes() == preview_cache(plain, 4).tobytes()
    assert preview_cache(plain, 4, seed=1).tobytes() != preview_cache(plain, 4).tobytes()


def test_one_class_alone_is_shown(plain, hostile):
    only = preview_cache(plain, 50, class_name=hostile, side=50)
    assert contains(only, draw_record(Records(plain).read(5, 0), (), 50))
    assert not contains(only, draw_record(Records(plain).read(4, 0), (), 50))


@pytest.mark.parametrize("labels", [None, np.linspace(-1, 1, 24, dtype=np.float32).reshape(12, 2)])
def test_unlabelled_samples_and_values_are_shown_too(labels, plain_cache, tmp_path):
    assert preview_cache(plain_cache(tmp_path / "cache", labels=labels, classes=(), variants=1), 5).width > 300


def test_a_cache_without_images_is_refused(tokens):
    with pytest.raises(UsageError, match="holds no image to show, only the fields tokens"):
        preview_cache(tokens)


def test_a_picture_is_written_as_its_name_says(plain, tmp_path):
    sheet = preview_cache(plain, 1)
    with Image.open(save_picture(sheet, tmp_path / "sheet.jpg")) as image:
        assert (image.format, image.size) == ("JPEG", sheet.size)
    with pytest.raises(UsageError, match=r"use \.png"):
        save_picture(sheet, tmp_path / "sheet.txt")
    with pytest.raises(TpucacheError, match="cannot be written"):
        save_picture(sheet, tmp_path / "none" / "sheet.png")
