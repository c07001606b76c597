"""Commands and missing libraries."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from scripts.checks.misuse.lab import COUNT, SIDE, Lab, check_photos, class_of, without
from scripts.checks.misuse.outcome import Outcome, Wrong, correct, equal, refused, refuses, succeeded, true
from scripts.checks.misuse.rows import row
from tpucache import CachedDataset, Recipe, RecipeError, TpucacheError, build_cache


@row
def commands_and_options_that_are_not_there(lab: Lab) -> Outcome:
    for words in (
        (),
        ("warm",),
        ("inspect",),
        ("inspect", lab.shared.cache(), "--nosuch"),
        ("warmup", "a", "b", "--fit", "zoom"),
    ):
        outcome = refused(lab.command(*words), status=2)
    return outcome


@row
def recipes_out_of_range(lab: Lab) -> Outcome:
    bad = [
        "--size=0",
        "--size=-5",
        "--size=99999",
        "--size=4x",
        "--size=1x2x3",
        "--variants=-1",
        "--variants=9999",
        "--seed=-1",
    ]
    bad += [
        "--quality=0",
        "--shard-mb=0",
        "--jobs=0",
        "--max-boxes=0",
        "--white-level=0",
        "--augment=nosuch",
        "--target=s3",
    ]
    for words in bad:
        variants = ("--variants", 1) if "augment" in words else ()
        done = lab.command("warmup", lab.shared.photos(), lab.folder / "cache", *variants, words)
        outcome = refused(
            done, words.strip("-").split("=")[0].replace("-", ".?"), status=done.status if done.status in (1, 2) else 2
        )
        true("nothing is left", not (lab.folder / "cache").exists())
    return outcome


@row
def recipes_out_of_range_from_Python(lab: Lab) -> Outcome:
    bad: list[dict[str, Any]] = [
        {"size": 0},
        {"size": "224"},
        {"size": 2.5},
        {"size": (1, 2, 3)},
        {"size": True},
        {"fit": "zoom"},
        {"variants": 1.0},
    ]
    bad += [
        {"codec": "gif"},
        {"codec": "jpeg", "quality": 101},
        {"quality": 5},
        {"seed": None},
        {"augment": None},
        {"exact": 1},
    ]
    for words in bad:
        outcome = refuses(lambda words=words: Recipe(**words), RecipeError, list(words)[-1])
    return outcome


@row
def arguments_of_build_cache_that_make_no_sense(lab: Lab) -> Outcome:
    photos, cache, recipe = lab.shared.photos(), lab.folder / "cache", Recipe(size=SIDE)
    for words in (
        {"on_error": "ignore"},
        {"target": "s3"},
        {"jobs": 0},
        {"jobs": -1},
        {"time_limit": "8h"},
        {"time_limit": float("nan")},
    ):
        outcome = refuses(
            lambda words=words: build_cache(photos, cache, recipe, **{"jobs": 1, **words}),
            TpucacheError,
            next(iter(words)),
        )
        shutil.rmtree(cache, ignore_errors=True)
    return outcome


@row
def rates_and_counts_of_nothing(lab: Lab) -> Outcome:
    for words in (
        "--device-rate=0",
        "--device-rate=-1",
        "--device-rate=nan",
        "--device-rate=inf",
        "--threads=0",
        "--batch-size=0",
    ):
        outcome = refused(lab.command("bench", lab.shared.cache(), words), words.split("=")[0].strip("-"), status=2)
    refused(lab.command("preview", lab.shared.cache(), "--samples=0"), "samples", status=2)
    return outcome


@row
def pictures_of_a_class_or_an_ending_that_is_not_there(lab: Lab) -> Outcome:
    done = lab.command("preview", lab.shared.cache(), "--class", "zebra", "-o", lab.folder / "s.png")
    refused(done, "zebra", "ant", status=done.status if done.status in (1, 2) else 2)
    for name in ("s.xyz", "s", "no/folder/s.png"):
        done = lab.command("preview", lab.shared.cache(), "-o", lab.folder / name)
        if done.status:
            outcome = refused(done, name.split("/")[-1], status=done.status if done.status in (1, 2) else 2)
    return outcome


@row
def a_picture_written_over_a_file_of_the_cache(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.cache())
    for words in (
        ("report", cache, "-o", cache / "manifest.json"),
        (
            "predict",
            lab.shared.run(),
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
        outcome = refused(done, "manifest.json|index.npy", status=done.status if done.status in (1, 2) else 2)
    return outcome


@row
def warmup_without_its_libraries(lab: Lab) -> Outcome:
    for library in ("lmdb", "PIL", "albumentations"):
        words = ("--variants", 1) if library == "albumentations" else ()
        done = lab.warmup(lab.shared.photos(), f"cache-{library}", *words, before=without(library))
        if library == "PIL" and not done.status:
            check_photos(CachedDataset(f"cache-{library}"), class_of, range(COUNT))
            continue
        outcome = refused(done, f"{library}|pillow", "install")
    return outcome


@row
def warmup_without_the_fast_libraries(lab: Lab) -> Outcome:
    fast = without("simplejpeg", "cykooz_resizer", "cv2")
    succeeded(lab.warmup(lab.shared.photos(), "cache", before=fast))
    return correct("Pillow does it: " + check_photos(CachedDataset("cache"), class_of, range(COUNT)))


@row
def reading_without_what_wrote_it(lab: Lab) -> Outcome:
    hidden = without(
        "lmdb", "PIL", "albumentations", "joblib", "tqdm", "cv2", "simplejpeg", "llvmlite", "fsspec", "matplotlib"
    )
    for words in (
        ("verify", lab.shared.cache()),
        ("inspect", lab.shared.cache()),
        ("bench", lab.shared.cache(), "--json", "--batch-size", 8),
    ):
        done = succeeded(lab.command(*words, before=hidden))
    true("a rate is reported", json.loads(done.out)["images_per_second"] > 0)
    succeeded(lab.train(lab.shared.cache(), lab.folder / "run", before=hidden))
    return correct("verify, inspect, bench and train need numpy and torch alone")


@row
def codecs_without_their_libraries(lab: Lab) -> Outcome:
    for codec, library in (("zstd", "zstandard"), ("jpeg", "PIL")):
        succeeded(lab.warmup(lab.shared.photos(), codec, "--codec", codec))
        hidden = without(library, "simplejpeg", "torchvision", "cv2")
        outcome = refused(lab.command("bench", codec, "--batch-size", 8, before=hidden), "install|needs", codec)
    return outcome


@row
def torch_xla_and_remote_files_without_their_libraries(lab: Lab) -> Outcome:
    words = ("train", lab.shared.cache(), "--run", lab.folder / "run", "--backend", "xla", "--model", "lab_module:tiny")
    refused(lab.command(*words, before=without("torch_xla")), "torch_xla", "install|--backend torch")
    return refused(
        lab.command("fetch", "s3://bucket/x", lab.folder / "x", before=without("fsspec")), "fsspec", "install"
    )


@row
def a_reader_of_the_output_that_goes_away(lab: Lab) -> Outcome:
    reader, writer = os.pipe()
    os.close(reader)
    done = lab.command("inspect", lab.shared.cache(), before=lambda: os.dup2(writer, 1))
    os.close(writer)
    true("no traceback", "Traceback" not in done.err and "Exception" not in done.err)
    return correct(f"exit status {done.status}, nothing on standard error")


@row
def an_interruption_by_the_keyboard(lab: Lab) -> Outcome:
    (lab.folder / "slow.py").write_text(
        "import time\ndef slow(image, generator):\n    time.sleep(0.2)\n    return image\n"
    )
    options = ("--size", SIDE, "--jobs", 1, "--variants", 1, "--augment", "slow:slow")
    for number in (signal.SIGINT, signal.SIGTERM):
        cache = f"cache-{number:d}"  # it shows that the command has begun, and so what it does with signals is settled
        running = lab.start("warmup", lab.shared.photos(), cache, *options)
        while not Path(cache).exists():
            if os.waitpid(running.pid, os.WNOHANG)[0]:
                raise Wrong("it ended by itself")
        running.signal(number)
        outcome = refused(running.wait(), "again", status=3)
    return outcome


@row
def a_full_list_of_skipped_samples_in_JSON(lab: Lab) -> Outcome:
    photos = lab.copy(lab.shared.photos(), "photos")
    (photos / "ant" / 'bad, "one".png').write_bytes(b"")
    succeeded(lab.warmup(photos, "cache", "--on-error", "skip"))
    report = json.loads(succeeded(lab.command("inspect", "cache", "--json")).out)
    equal("skipped", [entry["path"] for entry in report["skipped"]], ['ant/bad, "one".png'])
    true("with its reason", len(report["skipped"][0]["reason"]) > 5)
    return correct(f"its path and its reason: {report['skipped'][0]['reason']}")
