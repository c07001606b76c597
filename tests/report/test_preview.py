"""Pictures of records, contact sheets, and batches as the model receives them."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from patience import PATIENCE
from PIL import Image, ImageColor

from tpucache import CachedDataset, NotACacheError, TpucacheError, UsageError, preview_cache, report_cache
from tpucache.cli import main
from tpucache.loading.order import full_order
from tpucache.ondevice.draws import SHARE, draw
from tpucache.ondevice.settings import AugmentSettings
from tpucache.recipe import Recipe
from tpucache.report.page import Shown, choose, describe_label, read_record
from tpucache.report.preview import PALETTE as NAMED
from tpucache.report.preview import augmented_batch, draw_record, draw_sheet, preview_batch, save_picture
from tpucache.warmup import build_cache

PALETTE = [ImageColor.getrgb(name) for name in NAMED]
GREY = np.full((40, 40, 3), 128, np.uint8)


def colours(picture):
    return set(map(tuple, np.asarray(picture).reshape(-1, 3).tolist()))


def drawn_over(side, names=("a", "bee"), **fields):
    return np.asarray(draw_record({"image": GREY, **fields}, names, side))


@pytest.mark.parametrize("shape", [(40, 20, 3), (20, 40, 1), (1, 7, 3)])
def test_the_longer_side_is_as_asked_and_the_shape_stays(shape):
    picture = draw_record({"image": np.full(shape, 9, np.uint8)}, (), 100)
    assert (picture.mode, max(picture.size)) == ("RGB", 100)
    assert picture.width / picture.height == pytest.approx(shape[1] / shape[0], rel=0.05)
    assert colours(picture) == {(9, 9, 9)}


def test_values_of_more_bits_are_scaled_from_black_to_white():
    ramp = np.linspace(1000, 9000, 100).reshape(10, 10, 1).astype(np.uint16)
    shades = np.asarray(draw_record({"image": ramp}, (), 10))[..., 0].ravel()
    assert (shades[0], shades[-1]) == (0, 255)
    assert (shades[1:] >= shades[:-1]).all()


def test_each_value_of_a_mask_covers_what_it_marks_and_outlines_it():
    mask = np.zeros((40, 40, 1), np.uint8)
    mask[10:30, 10:30], mask[35:, 35:] = 1, 255
    pixels = drawn_over(40, mask=mask)
    assert {PALETTE[0], PALETTE[254 % len(PALETTE)]} <= colours(pixels)
    assert tuple(pixels[10, 20]) == PALETTE[0]
    inner = pixels[20, 20].astype(int)
    assert (np.sign(inner - 128) == np.sign(np.array(PALETTE[0]) - 128)).all()
    assert tuple(inner) not in {PALETTE[0], (128, 128, 128)}
    assert (pixels[mask[..., 0] == 0] == 128).all()


def test_boxes_are_drawn_where_they_are_with_their_class_and_empty_ones_are_not():
    boxes = np.array([[10, 20, 30, 39, 1], [-1] * 5, [np.nan, 0, 5, 5, 2], [9, 9, 9, 30, 3]], np.float32)
    named, other = drawn_over(160, boxes=boxes), drawn_over(160, ("a", "cow"), boxes=boxes)
    assert {tuple(named[y, x]) for x, y in [(40, 120), (119, 120), (80, 155)]} == {PALETTE[1]}
    assert not {PALETTE[2], PALETTE[3], PALETTE[-1]} & colours(named)
    assert not np.array_equal(named, other)
    assert np.array_equal(named[90:], other[90:])  # they differ in the name alone


def test_keypoints_in_view_are_drawn_and_others_are_not():
    pixels = drawn_over(160, keypoints=np.array([[10, 10, 1], [30, 30, 0], [np.inf, 1, 1]], np.float32))
    assert tuple(pixels[40, 40]) == PALETTE[0]
    assert (pixels[100:] == 128).all()


@pytest.mark.parametrize("name", ["", "日本 \U0001f600", "a\nb", "\udcff\u202e", "w" * 5000, "é Ł ß"])
def test_no_name_breaks_a_picture(name):
    drawn_over(64, (name,), boxes=np.array([[0, 0, 40, 40, 0], [38, 38, 40, 40, 0]], np.float32))


def test_fields_of_another_shape_are_not_drawn():
    others = {"mask": np.ones((3, 3), np.uint8), "boxes": np.ones((2, 4), np.float32), "keypoints": np.ones(3)}
    assert (drawn_over(40, **others) == 128).all()


# Records.


def test_records_are_those_of_the_position_and_the_variant(plain):
    whole, dataset = CachedDataset(plain), CachedDataset(plain, variant=2)
    for position in (0, 7, 11):
        image, _ = dataset[position]
        assert np.array_equal(read_record(whole, position, 2)["image"], image.permute(1, 2, 0).numpy())


def test_every_class_is_shown_before_one_is_shown_twice_and_the_seed_decides(plain_cache, tmp_path):
    labels = np.array([0] * 15 + [1, 2, 3, 3, 1])
    records = CachedDataset(plain_cache(tmp_path / "cache", samples=20, variants=1, labels=labels))
    for seed in range(5):
        chosen = choose(records, 6, seed)
        assert chosen == sorted(set(chosen)) == choose(records, 6, seed)
        assert all(count in (1, 2) for count in np.bincount(labels[chosen], minlength=4))
    assert len({tuple(choose(records, 6, seed)) for seed in range(9)}) > 1
    assert choose(records, 100) == list(range(20))


def test_samples_are_those_of_one_class_or_of_a_dataset(plain, drawn, hostile):
    assert choose(CachedDataset(plain), 9, class_name=hostile) == [1, 5, 9]
    assert choose(CachedDataset(drawn), 9, class_name="ant") == [0, 2, 4]  # several classes a sample
    assert choose(CachedDataset(plain, indices=[7, 3, 3]), 9) == [3, 7]


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (np.array(1), "bee"),
        (np.array(-1), "unlabelled"),
        (np.array(1.5), "1.5"),
        (np.array([1.0, 0, 1], np.float32), "ant, cat"),
        (np.array([0, 0.25, 0], np.float32), "bee 0.25"),
        (np.zeros(3, np.float32), "none of the classes"),
        (np.array([0.5, -3]), "0.5, -3"),
    ],
)
def test_a_label_is_shown_by_the_names_of_its_classes_or_its_values(label, text):
    assert describe_label(label, ("ant", "bee", "cat")) == text


# Sheets.


def contains(sheet, picture):
    """Return whether each row of a picture is in a sheet."""
    whole = sheet.tobytes()
    return all(row.tobytes() in whole for row in np.asarray(picture))


def test_every_variant_of_every_chosen_sample_is_on_the_sheet(plain, hostile):
    sheet, records = preview_cache(plain, 3, side=60), CachedDataset(plain)
    assert sheet.tobytes() == preview_cache(plain, 3, side=60).tobytes() != preview_cache(plain, 3, seed=1).tobytes()
    for position in choose(records, 3):
        for variant in (0, 1, 2):
            assert contains(sheet, draw_record(read_record(records, position, variant), records.manifest.classes, 60))
    hidden = next(position for position in range(12) if position not in choose(records, 3))
    assert not contains(sheet, draw_record(read_record(records, hidden, 0), (), 60))
    assert preview_cache(plain, 1, variants=2, side=300).width < preview_cache(plain, 1, side=300).width
    assert contains(
        preview_cache(plain, 50, class_name=hostile, side=50), draw_record(read_record(records, 5, 0), (), 50)
    )


def test_no_text_of_a_sheet_goes_beyond_its_column():
    sample = Shown("label " * 99, "a/long/path/" * 99, [{"image": GREY}])
    pixels = np.asarray(draw_sheet("title " * 99, "line " * 99, [sample] * 2, (), 40))
    assert (pixels[:, -36:] == 250).all()
    assert (pixels[120:, 36 + 40 : 36 + 72] == 250).all()  # between two samples


def test_unlabelled_samples_are_shown_too(plain_cache, tmp_path):
    assert preview_cache(plain_cache(tmp_path / "cache", labels=None, classes=(), variants=1), 5).width > 300


def test_what_cannot_be_shown_is_refused(tokens, plain, drawn, tmp_path):
    for call, error, words in (
        (lambda: preview_cache(tokens), UsageError, "holds no image to show, only the fields tokens"),
        (lambda: preview_batch(CachedDataset(tokens), AugmentSettings()), UsageError, "holds no image to show"),
        (lambda: preview_cache(plain, 0), UsageError, "no sample of"),
        (lambda: preview_batch(CachedDataset(plain), AugmentSettings(), 0), UsageError, "batch_size"),
        (
            lambda: preview_batch(CachedDataset(drawn), AugmentSettings(flip=True)),
            UsageError,
            "moves pixels and masks, not boxes",
        ),
        (
            lambda: preview_cache(plain, class_name="ants"),
            UsageError,
            "no class 'ants': it has 4 classes, such as 'ant'",
        ),
        (lambda: preview_cache(tmp_path), NotACacheError, "manifest"),
        (lambda: save_picture(Image.fromarray(GREY), tmp_path / "sheet.txt"), UsageError, r"use \.png"),
        (lambda: save_picture(Image.fromarray(GREY), tmp_path / "no" / "a.png"), TpucacheError, "cannot be written"),
    ):
        with pytest.raises(error, match=words):
            call()


def test_a_picture_is_written_as_its_name_says(plain, tmp_path):
    sheet = preview_cache(plain, 1)
    with Image.open(save_picture(sheet, tmp_path / "sheet.jpg")) as image:
        assert (image.format, image.size) == ("JPEG", sheet.size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lacking", "said"),
    [(("torch", "lmdb", "albumentations"), "Image"), (("PIL",), "pip install 'pillow>=10.1'")],
)
def test_neither_torch_nor_lmdb_is_needed_and_without_pillow_the_error_names_it(lacking, said, drawn):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({lacking!r}))\n"
        "import tpucache\n"
        "try:\n    tpucache.report_cache(sys.argv[1])\n    print(tpucache.preview_cache(sys.argv[1]))\n"
        "except tpucache.DependencyError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, drawn], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert said in done.stdout, done.stderr


# Batches.


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Images of 16 bits and 4 channels in two classes, with nothing else."""
    folder, rng = tmp_path_factory.mktemp("deep") / "cache", np.random.default_rng(0)
    items = [(rng.integers(0, 65536, (8, 8, 4)).astype(np.uint16), number % 2) for number in range(6)]
    build_cache(items, folder, Recipe(size=8, mode="keep"), jobs=1)
    return folder


@pytest.mark.parametrize("name", ["deep", "plain"])
def test_without_augmentation_the_images_of_the_first_batch_are_shown(name, request):
    dataset = CachedDataset(request.getfixturevalue(name))
    batch = dataset[full_order(len(dataset), 3, 0)[:4]]
    fields = augmented_batch(batch, AugmentSettings(), 3)
    for row in range(4):
        image, label = batch[row]
        np.testing.assert_allclose(fields["image"][row], image.permute(1, 2, 0).numpy(), atol=0.5)
        assert fields["label"][row] == label
    shown = draw_record({"image": fields["image"][2]}, (), 192)
    assert contains(preview_batch(dataset, AugmentSettings(), 4, seed=3), shown)


def test_mixed_labels_have_their_shares(deep):
    settings = AugmentSettings(mixup=1.0)
    batch = CachedDataset(deep)
    labels = augmented_batch(batch, settings, 0)["label"]
    shares, own = draw(settings, 0, 0, 6)[:, SHARE], np.eye(2)[batch.labels]
    assert np.allclose(labels, shares[:, None] * own + (1 - shares[:, None]) * np.roll(own, 1, 0), atol=1e-6)


def test_a_batch_shows_all_that_is_drawn(drawn):
    assert {*augmented_batch(CachedDataset(drawn), AugmentSettings(), 0)} == {
        "label",
        "image",
        "mask",
        "boxes",
        "keypoints",
    }


def test_each_view_of_a_sample_is_shown_as_it_is_drawn(deep):
    fields = augmented_batch(CachedDataset(deep), AugmentSettings(crop=True, zoom=0.5, tilt=10, views=2), 0)
    labels = fields["label"]
    assert len(fields["image"]) == 12
    assert torch.equal(torch.tensor(labels[0::2]), torch.tensor(labels[1::2]))
    assert len({image.tobytes() for image in fields["image"]}) == 12


def test_the_command_takes_the_augmentations_of_train_and_a_kept_copy(plain, tmp_path, capsys):
    command = ["preview", str(plain), "-o", str(tmp_path / "b.png"), "--json"]
    batch = [*command, "--batch", "--flip", "--augment", "cutmix=1", "--samples", "4"]
    assert main(batch) == 0
    picture = (tmp_path / "b.png").read_bytes()
    assert json.loads(capsys.readouterr().out)["bytes"] == len(picture)
    assert main([*batch, "--cache-dir", str(tmp_path / "kept")]) == 0
    assert (tmp_path / "b.png").read_bytes() == picture
    assert main([*command, "--flip"]) == 2
    assert "give --batch" in capsys.readouterr().err


def test_sheets_and_reports_show_images_of_any_depth(deep, parse):
    assert preview_cache(deep, 2).width > 300
    page = parse(report_cache(deep, 2).html)
    assert "channel 3" in page.sections["Channels"]
    assert "img" in page.tags
