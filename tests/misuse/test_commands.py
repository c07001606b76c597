"""Commands and missing libraries."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from lab import COUNT, SIDE, check_photos, class_of, without
from refusals import assert_refused, refuses, succeeded
from thorough import thorough

from tpucache import CachedDataset, Recipe, TpucacheError, build_cache


@pytest.mark.parametrize(
    ("status", "option"),
    [
        (1, "--size=0"),
        *thorough(*((1, f"--size={size}") for size in (-5, 99999))),
        *((2, f"--size={size}") for size in ("4x", "1x2x3")),
        *((1, option) for option in ("--variants=-1", "--variants=9999", "--seed=-1", "--quality=0", "--shard-mb=0")),
        *((2, option) for option in ("--jobs=0", "--max-boxes=0", "--white-level=0", "--target=s3")),
        (1, "--augment=nosuch"),
    ],
)
def test_an_option_of_warmup_out_of_range_is_refused_and_leaves_nothing(lab, status, option):
    variants = ("--variants", 1) if "augment" in option else ()
    done = lab.command("warmup", lab.shared.photos, "cache", *variants, option)
    assert_refused(done, option.strip("-").split("=")[0].replace("-", ".?"), status=status)
    assert not Path("cache").exists()


def test_arguments_of_build_cache_that_make_no_sense(lab):
    photos, cache, recipe = lab.shared.photos, lab.folder / "cache", Recipe(size=SIDE)
    for words in (
        {"on_error": "ignore"},
        {"target": "s3"},
        {"jobs": 0},
        {"jobs": -1},
        {"time_limit": "8h"},
        {"time_limit": float("nan")},
    ):
        with refuses(TpucacheError, next(iter(words))):
            build_cache(photos, cache, recipe, **{"jobs": 1, **words})
        shutil.rmtree(cache, ignore_errors=True)


def test_a_picture_written_over_a_file_of_the_cache(lab):
    cache = lab.copy(lab.shared.cache)
    for words in (
        ("report", cache, "-o", cache / "manifest.json"),
        (
            "predict",
            lab.shared.run,
            cache,
            "-o",
            cache / "index.npy",
            "--backend",
            "torch",
            "--trust",
            "lab_module:tiny",
        ),
    ):
        done = lab.command(*words)
        check_photos(CachedDataset(cache), class_of, range(COUNT))
        assert_refused(done, "manifest.json|index.npy", status=2)


@pytest.mark.thorough
def test_warmup_without_its_libraries(lab, apart):
    for library in ("lmdb", "PIL", "albumentations"):
        words = ("--variants", 1) if library == "albumentations" else ()
        done = apart.warmup(lab.shared.photos, f"cache-{library}", *words, first=without(library))
        assert_refused(done, f"{library}|pillow", "install")


@pytest.mark.thorough
def test_warmup_without_the_fast_libraries(lab, apart):
    fast = without("simplejpeg", "cykooz_resizer", "cv2")
    succeeded(apart.warmup(lab.shared.photos, "cache", first=fast))
    check_photos(CachedDataset("cache"), class_of, range(COUNT))


@pytest.mark.thorough
def test_codecs_without_their_libraries(lab, apart):
    for codec, library in (("zstd", "zstandard"), ("jpeg", "PIL")):
        succeeded(lab.warmup(lab.shared.photos, codec, "--codec", codec))
        hidden = without(library, "simplejpeg", "torchvision", "cv2")
        assert_refused(apart.command("bench", codec, "--batch-size", 8, first=hidden), "install|needs", codec)


def test_torch_xla_and_remote_files_without_their_libraries(lab, apart):
    words = ("train", lab.shared.cache, "--run", lab.folder / "run", "--backend", "xla", "--model", "lab_module:tiny")
    assert_refused(apart.command(*words, first=without("torch_xla")), "torch_xla", "install|--backend torch")
    assert_refused(
        apart.command("fetch", "hf://bucket/x", lab.folder / "x", first=without("fsspec")), "fsspec", "install"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, *thorough(signal.SIGTERM)])
def test_a_warmup_that_is_interrupted_says_that_the_same_command_continues(lab, apart, number):
    body = "    global calls\n    calls += 1\n    if calls == 5:\n        os.kill(os.getpid(), {})\n    return image\n"
    module = f"import os\ncalls = 0\ndef interrupt(image, generator):\n{body.format(int(number))}"
    (lab.folder / "interrupting.py").write_text(module)
    words = ("--variants", 1, "--augment", "interrupting:interrupt")
    assert_refused(apart.warmup(lab.shared.photos, "cache", *words), "again", status=3)


def test_a_full_list_of_skipped_samples_in_JSON(lab):
    photos = lab.copy(lab.shared.photos, "photos")
    (photos / "ant" / 'bad, "one".png').write_bytes(b"")
    succeeded(lab.warmup(photos, "cache", "--on-error", "skip"))
    report = json.loads(succeeded(lab.command("inspect", "cache", "--json")).out)
    assert [entry["path"] for entry in report["skipped"]] == ['ant/bad, "one".png']
    assert len(report["skipped"][0]["reason"]) > 5
