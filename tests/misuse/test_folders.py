"""Folders of photographs: names, links, broken files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
from lab import (
    COUNT,
    array,
    assert_same,
    check_photos,
    class_of,
    files_of,
)
from PIL import Image
from refusals import assert_refused, succeeded

from tpucache import CachedDataset


def test_broken_photographs_with_and_without_skip(lab):
    photos = lab.copy(lab.shared.photos, "photos")
    whole = (photos / "ant" / "0000.png").read_bytes()
    broken = {
        "empty.png": b"",
        "text.jpg": b"<html>404</html>",
        "cut.png": whole[: len(whole) // 2],
        "zero.jpg": bytes(999),
    }
    bomb = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\0\1\x86\xa0" * 2 + b"\x08\x02\0\0\0"
    broken["bomb.png"] = bomb
    for name, data in broken.items():
        (photos / "bee" / name).write_bytes(data)
    assert_refused(lab.warmup(photos, lab.folder / "first"), "bee/")
    done = succeeded(lab.warmup(photos, lab.folder / "cache", "--on-error", "skip"))
    for name in broken:
        assert f"bee/{name}" in done.out, f"{name} is listed"
    check_photos(CachedDataset(lab.folder / "cache"), class_of, range(COUNT))


def test_a_cache_written_into_its_own_source(lab):
    photos = lab.copy(lab.shared.photos, "photos")
    before = files_of(photos)
    done = lab.warmup(photos, photos)
    assert {name: digest for name, digest in files_of(photos).items() if name in before} == before
    assert_refused(done, "photos", status=2)


def test_a_cache_below_its_source_twice(lab):
    photos = lab.copy(lab.shared.photos, "photos")
    assert_refused(lab.warmup(photos, photos / "cache"), "cache", status=2)


def test_a_cache_where_other_files_lie(lab):
    mine = lab.folder / "mine"
    mine.mkdir()
    for name in ("index.npy", "samples.npz", "v00-00000.lmdb"):
        (mine / name).write_text("mine")
    done = lab.warmup(lab.shared.photos, mine)
    assert {p.read_text() for p in mine.iterdir() if p.is_file()} == {"mine"}
    assert_refused(done, "mine", status=1)


def test_a_folder_that_cannot_be_written_to(lab):
    file = lab.folder / "file"
    file.write_text("")
    assert_refused(lab.warmup(lab.shared.photos, file), "file")
    assert_refused(lab.warmup(lab.shared.photos, file / "cache"), "file")
    assert_refused(lab.warmup(lab.shared.photos, Path("/proc/cache")), "/proc/cache")


def test_relative_paths(lab):
    os.chdir(lab.folder)
    shutil.copytree(lab.shared.photos, "photos")
    succeeded(lab.warmup("photos/../photos", "deep/er/cache"))
    succeeded(lab.warmup("./photos/", "deep/er/cache/"))
    check_photos(CachedDataset("deep/er/cache"), class_of, range(COUNT))


def test_images_of_one_pixel_and_very_long_ones(lab):
    (lab.folder / "photos").mkdir()
    for name, shape in (("1", (1, 1, 3)), ("2", (1, 9000, 3)), ("3", (9000, 2, 3))):
        Image.fromarray(np.full(shape, 77, np.uint8)).save(lab.folder / "photos" / f"{name}.png")
    for fit in ("crop", "stretch"):
        succeeded(lab.warmup("photos", f"cache-{fit}", "--fit", fit))
        dataset = CachedDataset(lab.folder / f"cache-{fit}")
        for position in range(3):
            assert_same(array(dataset[position][0]), np.full((16, 16, 3), 77, np.uint8), fit)
