"""One record as a picture."""

from __future__ import annotations

import numpy as np
import pytest

from tpucache.report.draw import PALETTE, draw_record, draw_text, font_for

GREY = np.full((40, 40, 3), 128, np.uint8)


def colours(picture):
    return set(map(tuple, np.asarray(picture).reshape(-1, 3).tolist()))


@pytest.mark.parametrize("shape", [(40, 20, 3), (20, 40, 1), (1, 7, 3)])
def test_the_longer_side_is_as_asked_and_the_shape_stays(shape):
    picture = draw_record({"image": np.full(shape, 9, np.uint8)}, (), 100)
    assert max(picture.size) == 100
    assert picture.mode == "RGB"
    assert picture.width / picture.height == pytest.approx(shape[1] / shape[0], rel=0.05)
    assert colours(picture) == {(9, 9, 9)}


def test_pixels_of_a_tiny_image_are_shown_as_squares():
    image = np.array([[[0], [255]]], np.uint8)
    assert colours(draw_record({"image": image}, (), 100)) == {(0, 0, 0), (255, 255, 255)}


def test_a_mask_covers_what_it_marks_and_outlines_it():
    mask = np.zeros((40, 40, 1), np.uint8)
    mask[10:30, 10:30] = 1
    pixels = np.asarray(draw_record({"image": GREY, "mask": mask}, (), 40))
    assert tuple(pixels[10, 20]) == PALETTE[0]
    inner = pixels[20, 20].astype(int)
    assert (np.sign(inner - 128) == np.sign(np.array(PALETTE[0]) - 128)).all()
    assert tuple(inner) not in {PALETTE[0], (128, 128, 128)}
    outside = pixels.copy()
    outside[10:30, 10:30] = 128
    assert (outside == 128).all()


def test_each_mask_value_has_its_colour():
    mask = np.zeros((40, 40, 1), np.uint8)
    mask[:10, :10], mask[20:, 20:] = 2, 255
    shown = colours(draw_record({"image": GREY, "mask": mask}, (), 40))
    assert {PALETTE[1], PALETTE[254 % len(PALETTE)]} <= shown


def test_boxes_are_drawn_where_they_are_and_empty_ones_are_not():
    boxes = np.array([[10, 20, 30, 39, 0], [-1] * 5, [np.nan, 0, 5, 5, 1], [9, 9, 9, 30, 2]], np.float32)
    pixels = np.asarray(draw_record({"image": GREY, "boxes": boxes}, ("ant",), 80))
    for x, y in [(20, 60), (59, 60), (40, 77)]:
        assert tuple(pixels[y, x]) == PALETTE[0]
    assert not {PALETTE[1], PALETTE[2], PALETTE[-1]} & colours(pixels)
    none = draw_record({"image": GREY, "boxes": np.full((3, 5), -1, np.float32)}, (), 80)
    assert colours(none) == {(128, 128, 128)}


def test_a_box_tells_its_class():
    box = {"image": GREY, "boxes": np.array([[5, 20, 35, 38, 1]], np.float32)}
    named, other = (np.asarray(draw_record(box, names, 160)) for names in (("a", "bee"), ("a", "cow")))
    assert not np.array_equal(named, other)
    assert np.array_equal(named[90:], other[90:])  # they differ in the name's plate alone


def test_keypoints_in_view_are_drawn_and_others_are_not():
    points = np.array([[10, 10, 1], [30, 30, 0], [np.inf, 1, 1]], np.float32)
    pixels = np.asarray(draw_record({"image": GREY, "keypoints": points}, (), 160))
    assert tuple(pixels[40, 40]) == PALETTE[0]
    assert (pixels[100:] == 128).all()


@pytest.mark.parametrize("name", ["", "日本 \U0001f600", "a\nb", "\udcff\u202e", "w" * 500, "é Ł ß"])
def test_no_name_breaks_a_picture(name):
    boxes = np.array([[0, 0, 40, 40, 0], [38, 38, 40, 40, 0]], np.float32)
    draw_record({"image": GREY, "boxes": boxes}, (name,), 64)


def test_fields_of_another_shape_are_not_drawn():
    others = {"mask": np.ones((3, 3), np.uint8), "boxes": np.ones((2, 4), np.float32), "keypoints": np.ones(3)}
    assert colours(draw_record({"image": GREY, **others}, (), 40)) == {(128, 128, 128)}


def test_text_never_goes_beyond_its_width():
    from PIL import Image, ImageDraw

    for keep_end in (False, True):
        picture = Image.new("L", (400, 40))
        draw = ImageDraw.Draw(picture)
        draw_text(draw, (0, 30), "a very long line of text, no doubt", 20, 255, 100, anchor="ls", keep_end=keep_end)
        box = picture.getbbox()
        assert box is not None
        assert 80 < box[2] <= 101


def test_a_font_that_has_the_characters_is_taken_where_there_is_one():
    plain, accented = font_for("plain", 12), font_for("Łódź", 12)
    assert plain.getname()[0] == "Aileron"
    assert accented.getname()[0] in {"Aileron", "DejaVu Sans"}
