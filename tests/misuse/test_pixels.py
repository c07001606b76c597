"""Depths, orientation, masks and boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from lab import SIDE, Lab, array, assert_same, pixels, write_csv
from PIL import Image
from refusals import assert_refused, succeeded

from tpucache import CachedDataset

ORIENTATION = 0x0112
#: How a stored image is shown, for each orientation that EXIF knows.
SHOWN: dict[int, Any] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: np.rot90,
}


def save(folder: Path, name: str, image: Image.Image, orientation: int | None = None) -> Path:
    """Save an image, with an orientation where one is given."""
    folder.mkdir(exist_ok=True)
    options: dict[str, Any] = {}
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    image.save(folder / name, **options)
    return folder


def images(lab: Lab, source: Path | str, *words: object, cache: str = "cache") -> dict[str, np.ndarray]:
    """Warm up and return each sample's pixels by its path."""
    succeeded(lab.warmup(source, lab.folder / cache, *words))
    dataset = CachedDataset(lab.folder / cache)
    items = (dataset[n] for n in range(len(dataset)))
    return {p: array(i["image"] if isinstance(i, dict) else i[0]) for p, i in zip(dataset.paths, items, strict=True)}


def test_every_orientation_in_PNG_TIFF_and_JPEG(lab):
    stored = Image.fromarray(pixels(1))
    smooth = Image.fromarray(np.add.outer(np.arange(16) * 9, np.arange(16) * 4).astype(np.uint8)).convert("RGB")
    for orientation in SHOWN:
        save(lab.folder / "p", f"{orientation}.png", stored, orientation)
        save(lab.folder / "p", f"{orientation}.tif", stored, orientation)
        save(lab.folder / "p", f"{orientation}.jpg", smooth, orientation)
    found = images(lab, lab.folder / "p")
    for orientation, shown in SHOWN.items():
        assert_same(found[f"{orientation}.png"], np.ascontiguousarray(shown(pixels(1))), f"PNG {orientation}")
        assert_same(found[f"{orientation}.tif"], np.ascontiguousarray(shown(pixels(1))), f"TIFF {orientation}")
        apart = np.abs(found[f"{orientation}.jpg"].astype(int) - shown(np.asarray(smooth)).astype(int)).max()
        assert apart <= 12, f"JPEG {orientation} is within 12 of what is shown, not {apart}"


def test_sixteen_bits_in_full_use(lab):
    values = np.random.default_rng(3).integers(0, 65536, (SIDE, SIDE)).astype(np.uint16)
    values[0, :2] = 0, 65535
    save(lab.folder / "p", "a.png", Image.fromarray(values))
    found = images(lab, lab.folder / "p")["a.png"][..., 0].astype(int)
    apart = np.abs(found - values / 257).max()
    assert apart <= 1, f"each is within 1 of its 257th part, not {apart}"


def test_twelve_bits_in_sixteen(lab):
    values = np.random.default_rng(3).integers(0, 4096, (SIDE, SIDE)).astype(np.uint16)
    values[0, :2] = 0, 4095
    for name, image in (("a.png", Image.fromarray(values)), ("b.tif", Image.fromarray(values.astype(np.int32)))):
        folder = save(lab.folder / name[0], name, image)
        assert_refused(lab.warmup(folder, lab.folder / f"no-{name}"), name, "white")
        found = images(lab, folder, "--white-level", 4095, cache=f"cache-{name}")[name][..., 0].astype(int)
        apart = np.abs(found - values / 4095 * 255).max()
        assert apart <= 1, f"with --white-level each is within 1 of its share, not {apart}"


def test_floats_of_zero_to_one_and_of_other_ranges(lab):
    values = np.random.default_rng(3).random((SIDE, SIDE)).astype(np.float32)
    found = images(lab, save(lab.folder / "p", "a.tif", Image.fromarray(values)))["a.tif"][..., 0]
    assert np.abs(found - values * 255).max() <= 1
    for number, scale in enumerate((3.0, 200.0, -1.0, np.nan)):
        folder = save(lab.folder / f"p{number}", "b.tif", Image.fromarray(values * np.float32(scale)))
        assert_refused(lab.warmup(folder, lab.folder / f"cache{number}"), "b.tif")


def test_transparency_palettes_greys_and_CMYK(lab):
    rgba = np.dstack([pixels(5), np.full((SIDE, SIDE), 255, np.uint8)])
    rgba[0, 0] = (10, 20, 30, 0)
    expected = pixels(5)
    expected[0, 0] = 255
    grey = pixels(6)[..., 0]
    colours = np.arange(256, dtype=np.uint8).reshape(16, 16)
    palette = Image.fromarray(colours).convert("P")
    palette.putpalette(pixels(7).reshape(-1).tolist())
    for name, image in (("a.png", Image.fromarray(rgba)), ("b.png", Image.fromarray(grey)), ("c.png", palette)):
        save(lab.folder / "p", name, image)
    cmyk = np.zeros((SIDE, SIDE, 4), np.uint8)
    cmyk[..., 3] = 255
    save(lab.folder / "p", "d.tif", Image.fromarray(cmyk, "CMYK"))
    found = images(lab, lab.folder / "p")
    assert_same(found["a.png"], expected)
    assert_same(found["b.png"], np.repeat(grey[..., None], 3, 2))
    assert_same(found["c.png"], pixels(7))
    assert_same(found["d.tif"], np.zeros((SIDE, SIDE, 3), np.uint8))


def masked(lab: Lab, orientation: int, shown: bool) -> Path:
    """Write a turned image with a mask, drawn as displayed or as stored; return their table."""
    mask = (pixels(9)[..., 0] // 64).astype(np.uint8)
    save(lab.folder / "p", "image.png", Image.fromarray(pixels(8)), orientation)
    save(
        lab.folder / "p", "mask.png", Image.fromarray(np.ascontiguousarray(SHOWN[orientation](mask) if shown else mask))
    )
    return write_csv(lab.folder / "p" / "t.csv", [{"image": "image.png", "mask": "mask.png"}])


def test_a_mask_over_an_image_that_EXIF_turns(lab):
    for orientation in range(2, 9):
        for name in ("displayed", "stored"):
            table, words = masked(lab, orientation, name == "displayed"), ("--mask-col", "mask")
            if orientation in (3, 6):
                assert_refused(lab.warmup(table, f"no-{orientation}{name}", *words), "--coordinates", "image.png")
            cache = f"cache-{orientation}-{name}"
            found = images(lab, table, *words, "--coordinates", name, cache=cache)
            item = CachedDataset(lab.folder / cache)[0]
            expected = np.ascontiguousarray(SHOWN[orientation](pixels(9)[..., 0] // 64))
            assert_same(
                found["image.png"], np.ascontiguousarray(SHOWN[orientation](pixels(8))), f"{name} image {orientation}"
            )
            assert_same(item["mask"].numpy().reshape(SIDE, SIDE), expected, f"{name} mask {orientation}")


def test_a_mask_of_another_size_or_kind(lab):
    masks = {"small": Image.fromarray(pixels(1, 8)[..., 0]), "colour": Image.fromarray(pixels(1))}
    for name, image in masks.items():
        save(lab.folder / "p", "image.png", Image.fromarray(pixels(8)))
        save(lab.folder / "p", f"{name}.png", image)
        table = write_csv(lab.folder / "p" / f"{name}.csv", [{"image": "image.png", "mask": f"{name}.png"}])
        assert_refused(lab.warmup(table, f"cache-{name}", "--mask-col", "mask"), "mask", "image.png")


BOXES = """
import numpy as np
class Items:
    def __init__(self, boxes): self.boxes = boxes
    def __len__(self): return len(self.boxes)
    def __getitem__(self, i): return {"image": np.full((32, 16, 3), 9, np.uint8), "boxes": self.boxes[i]}
def good(): return Items([np.array([[0, 8, 16, 24], [2, 10, 6, 14.]]), np.zeros((0, 4))])
def outside(): return Items([np.array([[-5., 8, 16, 24]])])
def many(): return Items([np.tile([[0., 8, 16, 24]], (9, 1))])
def swapped(): return Items([np.array([[16., 24, 0, 8]])])
def missing(): return Items([np.array([[np.nan, 8, 16, 24]])])
def flat(): return Items([np.array([0., 8, 16, 24])])
"""


def test_boxes_in_and_out_of_the_crop(lab):
    (lab.folder / "own_boxes.py").write_text(BOXES)
    succeeded(lab.warmup("own_boxes:good", lab.folder / "cache"))
    boxes = CachedDataset(lab.folder / "cache")[0]["boxes"].numpy()
    expected = np.array([[0, 0, 16, 16], [2, 2, 6, 6]], np.float32)
    assert_same(boxes[:2, :4].astype(np.float32), expected)
    for name in ("many", "swapped", "missing", "flat"):
        words = ("--max-boxes", 4) if name == "many" else ()
        assert_refused(lab.warmup(f"own_boxes:{name}", lab.folder / f"cache-{name}", *words), "box")
    succeeded(lab.warmup("own_boxes:outside", lab.folder / "cache-outside"))
    box = CachedDataset(lab.folder / "cache-outside")[0]["boxes"].numpy()[0, :4]
    assert box.tolist() == [0.0, 0.0, 16.0, 16.0]
