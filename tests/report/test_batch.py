"""A batch is shown as the model receives it."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image

from tpucache import CachedDataset, UsageError
from tpucache.cli import main
from tpucache.loading.sampler import full_order
from tpucache.ondevice.draws import SHARE, draw
from tpucache.ondevice.settings import AugmentSettings
from tpucache.recipe import Recipe
from tpucache.report import batch as batches
from tpucache.report.batch import preview_batch
from tpucache.report.cache_page import report_cache
from tpucache.report.preview import preview_cache
from tpucache.warmup.build import build_cache
from tpucache.warmup.sources.table import TableOptions, TableSource


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Images of 16 bits and 4 channels in two classes, with nothing else."""
    folder = tmp_path_factory.mktemp("deep")
    rng = np.random.default_rng(0)
    for number in range(6):
        path = folder / "source" / "ab"[number % 2] / f"{number}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rng.integers(0, 65536, (8, 8, 4)).astype(np.uint16))
    build_cache(folder / "source", folder / "cache", Recipe(size=8, mode="keep"), jobs=1)
    return folder / "cache"


@pytest.fixture
def drawn(monkeypatch):
    """Collect what is drawn: the fields and the label of each sample."""
    found = []
    draw_record, describe_label = batches.draw_record, batches.describe_label
    monkeypatch.setattr(batches, "draw_record", lambda one, *rest: found.append(one) or draw_record(one, *rest))
    monkeypatch.setattr(batches, "describe_label", lambda *given: found.append(describe_label(*given)) or found[-1])
    return found


def test_without_augmentation_the_images_of_the_first_batch_are_shown(deep, drawn):
    preview_batch(deep, samples=4, seed=3)
    dataset = CachedDataset(deep)
    order = full_order(6, 3, 0)[:4].tolist()
    assert drawn[::2] == [dataset.classes[dataset[position][1]] for position in order]
    for fields, position in zip(drawn[1::2], order, strict=True):
        np.testing.assert_allclose(fields["image"], dataset[position][0].permute(1, 2, 0).numpy(), atol=1)


def test_mixed_labels_are_written_with_their_shares(deep, drawn):
    settings = AugmentSettings(mixup=1.0)
    preview_batch(deep, settings, 6)
    shares = draw(settings, 0, 0, 6)[:, SHARE]
    dataset = CachedDataset(deep)
    order = full_order(6, 0, 0).tolist()
    mixed = [set(text.split(", ")) for text in drawn[::2] if "," in text]
    assert mixed
    for row, text in enumerate(drawn[::2]):
        own, other = (dataset.classes[dataset[order[at]][1]] for at in (row, row - 1))
        if own != other:
            assert set(text.split(", ")) == {f"{own} {shares[row]:.2g}", f"{other} {1 - shares[row]:.2g}"}


@pytest.mark.slow
def test_masks_move_with_their_image_and_boxes_are_shown_where_nothing_moves(drawn_cache, drawn, tmp_path):
    cache = drawn_cache(tmp_path / "cache", "raw")
    preview_batch(cache, samples=2)
    assert {"mask", "boxes"} <= drawn[1].keys()
    drawn.clear()
    preview_batch(cache, AugmentSettings(flip=True, cutmix=1.0), 2)
    assert {*drawn[1]} == {"image", "mask"}


def test_masks_are_cut_where_their_images_are(drawn, tmp_path):
    rows = []
    for number in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
        Image.new("L", (8, 8), number).save(tmp_path / f"mask{number}.png")
        rows.append(f"{number}.png,mask{number}.png")
    (tmp_path / "t.csv").write_text("\n".join(["path,mask", *rows]))
    build_cache(TableSource(tmp_path / "t.csv", TableOptions(mask_col="mask")), tmp_path / "c", Recipe(size=8), jobs=1)
    preview_batch(tmp_path / "c", AugmentSettings(cutmix=1.0), 4)
    assert max(len(np.unique(fields["mask"])) for fields in drawn[1::2]) == 2


def test_each_view_of_a_sample_is_shown_as_it_is_drawn(deep, drawn):
    settings = AugmentSettings(crop=True, zoom=0.5, tilt=10, views=2)
    preview_batch(deep, settings, 3)
    labels, fields = drawn[::2], drawn[1::2]
    assert len(fields) == 6
    assert labels[0::2] == labels[1::2]
    assert all(not np.array_equal(one["image"], other["image"]) for one, other in itertools.pairwise(fields))


def test_a_cache_without_images_is_refused(tokens):
    with pytest.raises(UsageError, match="holds no image to show"):
        preview_batch(tokens)


def test_the_command_takes_the_augmentations_of_train(deep, tmp_path, capsys):
    command = ["preview", str(deep), "-o", str(tmp_path / "b.png"), "--json"]
    assert main([*command, "--batch", "--flip", "--cutmix", "1", "--samples", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == (tmp_path / "b.png").stat().st_size
    assert main([*command, "--flip"]) == 2
    assert "give --batch" in capsys.readouterr().err


def test_the_command_shows_the_variants_of_a_kept_copy_too(drawn, tmp_path):
    (source := tmp_path / "source").mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(source / f"{number}.png")
    build_cache(source, tmp_path / "c", Recipe(size=8, variants=2), jobs=1)
    command = ["preview", str(tmp_path / "c"), "-o", str(tmp_path / "b.png"), "--batch"]
    assert main(command) == 0
    assert main([*command, "--cache-dir", str(tmp_path / "kept")]) == 0
    images = [fields["image"] for fields in drawn[1::2]]
    assert len(images) == 8
    for at_path, kept in zip(images[:4], images[4:], strict=True):
        np.testing.assert_array_equal(at_path, kept)


def test_sheets_and_reports_show_images_of_any_depth(deep):
    assert preview_cache(deep, 2).width > 300
    page = report_cache(deep, 2).html
    assert "channel 3" in page
    assert "data:image/" in page
    assert ">255<" not in page


def test_targets_of_numbers_are_the_numbers():
    values = torch.tensor([[1.5], [2.0]])
    assert torch.equal(batches._targets(values, 0), values)
    assert torch.equal(batches._targets(values[:, 0], 0), values)
