"""Ordinary options: rates, regressions, masks, boxes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from lab import SIDE, Lab, pixels, write_csv
from PIL import Image
from refusals import assert_refused, succeeded

_GREYS = 24
_TRAIN = ("--backend", "torch", "--batch-size", 8, "--epochs", 1)


def greys(folder: Path, classes: tuple[str, ...] = ()) -> list[Path]:
    """Write images of one grey each, from dark to bright, into a folder for each class; return them in this order."""
    paths = []
    for number, grey in enumerate(np.linspace(20, 230, _GREYS).astype(int)):
        path = folder / (classes[number * len(classes) // _GREYS] if classes else "") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (SIDE, SIDE), (int(grey),) * 3).save(path)
        paths.append(path)
    return paths


def test_an_optimizer_without_a_rate(lab):
    greys(lab.folder / "p", ("dark", "light"))
    cache, rates = lab.folder / "cache", {}
    succeeded(lab.warmup(lab.folder / "p", cache))
    for optimizer in ("sgd", "adamw"):
        run = lab.folder / optimizer
        words = ("train", cache, "--run", run, *_TRAIN, "--model", "cnn", "--optimizer", optimizer)
        done = succeeded(lab.command(*words))
        rates[optimizer] = json.loads((run / "run.json").read_text())["settings"]["lr"]
        assert "weight decay" in done.out
        assert "one-cycle" in done.out
    assert rates["adamw"] < 0.1 * rates["sgd"]


@pytest.mark.thorough
def test_prices_as_labels(lab):
    prices = np.linspace(1e5, 5.5e5, _GREYS)
    paths = greys(lab.folder / "p")
    table = [{"path": path.name, "price": price} for path, price in zip(paths, prices, strict=True)]
    write_csv(lab.folder / "p" / "t.csv", table)
    cache, run = lab.folder / "cache", lab.folder / "run"
    succeeded(lab.warmup(lab.folder / "p" / "t.csv", cache, "--label-col", "price", "--labels", "numbers"))
    words = ("train", cache, "--valid", cache, "--run", run, *_TRAIN, "--model", "cnn", "--epochs", 20)
    succeeded(lab.command(*words))
    error = min(row["valid_rmse"] for row in json.loads((run / "report.json").read_text())["epochs"])
    assert error < prices.std(), f"the root of the mean squared error, {error:,.0f}, is below the labels' deviation"


def masked(lab: Lab, values: tuple[int, int]) -> Path:
    """Write images with a mask of these two values each; return their table."""
    table = []
    for number in range(8):
        mask = np.where(pixels(number)[..., 0] > 127, *values[::-1]).astype(np.uint8)
        for name, data in (("image", pixels(number)), ("mask", mask)):
            (lab.folder / "p").mkdir(exist_ok=True)
            Image.fromarray(data).save(lab.folder / "p" / f"{name}-{number}.png")
        table.append({"image": f"image-{number}.png", "mask": f"mask-{number}.png"})
    return write_csv(lab.folder / "p" / "t.csv", table)


def test_masks_of_black_and_white(lab):
    table, cache = masked(lab, (0, 255)), lab.folder / "cache"
    assert_refused(lab.warmup(table, cache, "--mask-col", "mask"), "0 and 255 alone", "--mask-values scale")
    succeeded(lab.warmup(table, cache, "--mask-col", "mask", "--mask-values", "keep"))
    words = ("--run", lab.folder / "run", *_TRAIN, "--model", "unet", "--mask-classes", 2, "--task", "mask")
    assert_refused(lab.command("train", cache, *words), "255", "nothing to learn", "--mask-values scale", status=2)


def test_masks_without_naming_their_task(lab):
    table, cache, run = masked(lab, (0, 1)), lab.folder / "cache", lab.folder / "run"
    succeeded(lab.warmup(table, cache, "--mask-col", "mask"))
    succeeded(lab.command("train", cache, "--run", run, *_TRAIN, "--model", "unet", "--mask-classes", 2))
    assert json.loads((run / "run.json").read_text())["task"] == "mask"


def test_boxes_as_labels(lab):
    greys(lab.folder / "p")
    images = [{"id": number, "file_name": f"{number:02}.png", "width": SIDE, "height": SIDE} for number in range(8)]
    boxes = [
        {"id": number, "image_id": number, "category_id": number % 2, "bbox": [1, 1, 5, 5], "area": 25, "iscrowd": 0}
        for number in range(8)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(("cat", "dog"))]
    content = {"images": images, "annotations": boxes, "categories": categories}
    (lab.folder / "boxes.json").write_text(json.dumps(content))
    cache = lab.folder / "cache"
    words = ("--boxes", lab.folder / "boxes.json")
    succeeded(lab.warmup(lab.folder / "p", cache, *words, "--on-error", "skip"))
    assert_refused(lab.train(cache, lab.folder / "run"), "boxes", "no task for", status=2)
