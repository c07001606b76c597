"""Folders of photographs: names, links, broken files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from scripts.checks.misuse.lab import COUNT, Lab, array, check_photos, class_of, files_of, pixels, write_photos
from scripts.checks.misuse.outcome import Outcome, correct, equal, refused, succeeded, true
from scripts.checks.misuse.rows import row
from tpucache import CachedDataset


@row
def an_empty_folder(lab: Lab) -> Outcome:
    (lab.folder / "empty" / "ant").mkdir(parents=True)
    outcome = refused(lab.warmup(lab.folder / "empty", lab.folder / "cache"), "empty")
    true("nothing is left", not (lab.folder / "cache").exists())
    return outcome


@row
def a_source_that_is_no_folder(lab: Lab) -> Outcome:
    photo = next(lab.shared.photos().rglob("*.png"))
    refused(lab.warmup(photo, lab.folder / "cache"), photo.name, "folder")
    return refused(lab.warmup(lab.folder / "nowhere", lab.folder / "cache"), "nowhere", "folder")


@row
def one_sample(lab: Lab) -> Outcome:
    succeeded(lab.warmup(write_photos(lab.folder / "one", 1), lab.folder / "cache"))
    return correct(check_photos(CachedDataset(lab.folder / "cache"), class_of, [0]))


@row
def names_with_spaces_signs_newlines_and_other_scripts(lab: Lab) -> Outcome:
    names = [
        "a b.png",
        "-rf.png",
        "Ünïcødé 猫.png",
        "new\nline.png",
        "#1?&%20.png",
        "'\";$(x).png",
        "tab\t.png",
        "é.png",
    ]
    names.append("e\u0301.png")  # not the same file as the one before
    names.append(os.fsdecode(b"latin-\xe9.png"))
    classes = ("été 1", "-x\n")
    for number, name in enumerate(names):
        file = lab.folder / "odd photos" / classes[number % 2] / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number)).save(file)
    done = succeeded(lab.warmup("odd photos", lab.folder / "odd cache\n"))
    true("what is printed is text", "Traceback" not in done.out)
    dataset = CachedDataset(lab.folder / "odd cache\n")
    expected = {f"{classes[n % 2]}/{name}": n for n, name in enumerate(names)}
    equal("paths", sorted(dataset.paths), sorted(expected))
    for position, path in enumerate(dataset.paths):
        image, label = dataset[position]
        equal(repr(path), array(image), pixels(expected[path]))
        equal(repr(path), dataset.classes[int(label)], path.partition("/")[0])
    succeeded(lab.command("inspect", lab.folder / "odd cache\n"))
    return correct(f"{len(names)} odd names are kept, with their pixels and classes")


@row
def classes_that_differ_by_case_only(lab: Lab) -> Outcome:
    succeeded(lab.warmup(write_photos(lab.folder / "p", 12, ("Cat", "cat", "CAT")), lab.folder / "cache"))
    names = ("Cat", "cat", "CAT")
    return correct(check_photos(CachedDataset(lab.folder / "cache"), lambda n: names[n % 3], range(12)))


@row
def files_of_other_types_among_the_photographs(lab: Lab) -> Outcome:
    photos = lab.copy(lab.shared.photos(), "photos")
    for name in ("x.psd", "y.raw", "z.raw", "without"):
        (photos / "ant" / name).write_bytes(b"data")
    done = succeeded(lab.warmup(photos, lab.folder / "cache"))
    for words in ("1 '.psd'", "2 '.raw'", "1 '(no suffix)'"):
        true(f"{words} is reported in {done.out!r}", words in done.out)
    return correct(
        "three types are counted; " + check_photos(CachedDataset(lab.folder / "cache"), class_of, range(COUNT))
    )


@row
def broken_photographs_with_and_without_skip(lab: Lab) -> Outcome:
    photos = lab.copy(lab.shared.photos(), "photos")
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
    refused(lab.warmup(photos, lab.folder / "first"), "bee/")
    done = succeeded(lab.warmup(photos, lab.folder / "cache", "--on-error", "skip"))
    for name in broken:
        true(f"{name} is listed", f"bee/{name}" in done.out)
    return correct("five are listed; " + check_photos(CachedDataset(lab.folder / "cache"), class_of, range(COUNT)))


@row
def only_broken_photographs(lab: Lab) -> Outcome:
    (lab.folder / "photos").mkdir()
    (lab.folder / "photos" / "a.png").write_bytes(b"no")
    return refused(lab.warmup(lab.folder / "photos", lab.folder / "cache", "--on-error", "skip"))


@row
def links_to_photographs_and_to_a_folder_of_them(lab: Lab) -> Outcome:
    photos = lab.folder / "photos"
    (photos / "bee").mkdir(parents=True)
    (photos / "ant").symlink_to(lab.shared.photos() / "ant")
    for number in range(1, COUNT, 3):
        (photos / "bee" / f"{number:04d}.png").symlink_to(lab.shared.photos() / "bee" / f"{number:04d}.png")
    succeeded(lab.warmup(photos, lab.folder / "cache"))
    numbers = [n for n in range(COUNT) if n % 3 < 2]
    return correct(check_photos(CachedDataset(lab.folder / "cache"), class_of, numbers))


@row
def links_in_a_circle_and_into_nothing(lab: Lab) -> Outcome:
    photos = lab.copy(lab.shared.photos(), "photos")
    (photos / "ant" / "again").symlink_to(photos)
    (photos / "bee" / "gone.png").symlink_to(lab.folder / "nothing")
    done = lab.warmup(photos, lab.folder / "cache")
    if done.status:
        return refused(done, "gone.png|again")
    return correct(check_photos(CachedDataset(lab.folder / "cache"), class_of, range(COUNT)))


@row
def a_cache_written_into_its_own_source(lab: Lab) -> Outcome:
    photos = lab.copy(lab.shared.photos(), "photos")
    before = files_of(photos)
    done = lab.warmup(photos, photos)
    if not done.status:
        check_photos(CachedDataset(photos), class_of, range(COUNT))
        return correct("the photographs are untouched and the cache lies beside them")
    equal("photographs", {name: digest for name, digest in files_of(photos).items() if name in before}, before)
    return refused(done, "photos", status=done.status)


@row
def a_cache_below_its_source_twice(lab: Lab) -> Outcome:
    photos = lab.copy(lab.shared.photos(), "photos")
    for _ in range(2):
        done = lab.warmup(photos, photos / "cache")
        if done.status:
            return refused(done, "cache", status=done.status)
    return correct(check_photos(CachedDataset(photos / "cache"), class_of, range(COUNT)))


@row
def a_cache_where_other_files_lie(lab: Lab) -> Outcome:
    mine = lab.folder / "mine"
    mine.mkdir()
    for name in ("index.npy", "samples.npz", "v00-00000.lmdb"):
        (mine / name).write_text("mine")
    done = lab.warmup(lab.shared.photos(), mine)
    equal("files", {p.read_text() for p in mine.iterdir() if p.is_file()}, {"mine"})
    return refused(done, "mine", status=done.status)


@row
def a_folder_that_cannot_be_written_to(lab: Lab) -> Outcome:
    file = lab.folder / "file"
    file.write_text("")
    refused(lab.warmup(lab.shared.photos(), file), "file")
    refused(lab.warmup(lab.shared.photos(), file / "cache"), "file")
    return refused(lab.warmup(lab.shared.photos(), Path("/proc/cache")), "/proc/cache")


@row
def relative_paths(lab: Lab) -> Outcome:
    os.chdir(lab.folder)
    shutil.copytree(lab.shared.photos(), "photos")
    succeeded(lab.warmup("photos/../photos", "deep/er/cache"))
    succeeded(lab.warmup("./photos/", "deep/er/cache/"))
    return correct(check_photos(CachedDataset("deep/er/cache"), class_of, range(COUNT)))


@row
def a_dataset_of_ones_own_that_fails(lab: Lab) -> Outcome:
    code = """
import numpy as np
class Items:
    def __len__(self): return 5
    def __getitem__(self, i):
        if i == 3: raise RuntimeError("item 3 is bad")
        return np.zeros((16, 16, 3), np.uint8), i
def items(): return Items()
def nothing(): return None
def broken(): raise ValueError("no such data")
"""
    (lab.folder / "own_data.py").write_text(code)
    refused(lab.warmup("own_data:items", "cache"), "own_data:items", "item 3 is bad")
    refused(lab.warmup("own_data:nothing", "cache"), "own_data:nothing")
    refused(lab.warmup("own_data:broken", "cache"), "no such data")
    done = lab.warmup("own_data:nosuch", "cache")
    return refused(done, "nosuch", status=done.status if done.status in (1, 2) else 1)


@row
def images_of_one_pixel_and_very_long_ones(lab: Lab) -> Outcome:
    (lab.folder / "photos").mkdir()
    for name, shape in (("1", (1, 1, 3)), ("2", (1, 9000, 3)), ("3", (9000, 2, 3))):
        Image.fromarray(np.full(shape, 77, np.uint8)).save(lab.folder / "photos" / f"{name}.png")
    for fit in ("crop", "stretch"):
        succeeded(lab.warmup("photos", f"cache-{fit}", "--fit", fit))
        dataset = CachedDataset(lab.folder / f"cache-{fit}")
        for position in range(3):
            equal(fit, array(dataset[position][0]), np.full((16, 16, 3), 77, np.uint8))
    return correct("their one colour fills all images")
