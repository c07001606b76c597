"""Sources and recipes that change, runs that are killed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from scripts.checks.misuse.lab import (
    CLASSES,
    COUNT,
    MODULE,
    SIDE,
    Lab,
    check_photos,
    class_of,
    files_of,
    write_csv,
    write_photos,
)
from scripts.checks.misuse.outcome import Outcome, Wrong, correct, equal, refused, succeeded, true
from scripts.checks.misuse.rows import row
from scripts.checks.misuse.try_damage import exchange_bytes
from scripts.checks.misuse.try_tables import rows
from tpucache import CachedDataset, Recipe, UnfinishedError, build_cache

INVERT = ("--variants", 2, "--augment", "lab_module:invert")


def copies(lab: Lab) -> tuple[Path, Path]:
    """Return copies of the photographs and of their cache."""
    return lab.copy(lab.shared.photos(), "photos"), lab.copy(lab.shared.cache(), "cache")


@row
def the_same_command_twice(lab: Lab) -> Outcome:
    photos, cache = copies(lab)
    before = files_of(cache)
    succeeded(lab.warmup(photos, cache))
    equal("files", files_of(cache), before)
    return correct("the finished cache is left as it is, to the byte")


@row
def another_recipe_for_a_finished_cache(lab: Lab) -> Outcome:
    photos, cache = copies(lab)
    before = files_of(cache)
    for words in (("--size", 8), ("--fit", "pad"), ("--codec", "png"), ("--exact",)):
        outcome = refused(lab.warmup(photos, cache, *words), words[0].strip("-"), "another|same|new")
        equal("files", files_of(cache), before)
    return outcome


@row
def variants_added_to_photographs_that_changed_at_equal_size(lab: Lab) -> Outcome:
    photos, cache = copies(lab)
    first, second = sorted((photos / "ant").iterdir())[:2]
    exchange_bytes(first, second)
    os.truncate(first, (lab.shared.photos() / "ant" / first.name).stat().st_size)
    os.truncate(second, (lab.shared.photos() / "ant" / second.name).stat().st_size)
    done = lab.warmup(photos, cache, *INVERT)
    if not done.status:
        check_photos(CachedDataset(cache), class_of, range(COUNT))
        raise Wrong("variants of other photographs were added")
    check_photos(CachedDataset(cache), class_of, range(COUNT))
    return refused(done, "ant")


@row
def variants_added_to_a_cache(lab: Lab) -> Outcome:
    photos, cache = copies(lab)
    clean = {name: digest for name, digest in files_of(cache).items() if name.startswith("v00")}
    succeeded(lab.warmup(photos, cache, *INVERT))
    equal("clean shards", {name: digest for name, digest in files_of(cache).items() if name.startswith("v00")}, clean)
    dataset, augmented = CachedDataset(cache), CachedDataset(cache, 2)
    for position in range(COUNT):
        true("variant 2 is the inverted photograph", bool((dataset[position][0] + augmented[position][0] == 255).all()))
    return correct(check_photos(dataset, class_of, range(COUNT)) + "; the variants are inverted")


@row
def an_augmentation_whose_code_changed(lab: Lab) -> Outcome:
    for number, text in enumerate((MODULE.replace("255 - image", "image // 2"), "from lab_part import invert\n")):
        (lab.folder / f"own{number}.py").write_text(MODULE if not number else text)
    (lab.folder / "lab_part.py").write_text(MODULE)
    photos = lab.shared.photos()
    for name, changed in (("own0", "own0.py"), ("own1", "lab_part.py")):
        cache = lab.folder / f"cache-{name}"
        succeeded(lab.warmup(photos, cache, "--variants", 1, "--augment", f"{name}:invert"))
        (lab.folder / changed).write_text(MODULE.replace("255 - image", "image // 2"))
        outcome = refused(lab.warmup(photos, cache, "--variants", 2, "--augment", f"{name}:invert"))
    return outcome


@row
def an_augmentation_that_gives_something_else(lab: Lab) -> Outcome:
    code = "import numpy as np\ncount = 0\ndef {}(image, generator):\n    {}\n"
    bodies = {"small": "return image[:3]", "floats": "return image / 255", "none": "return None"}
    bodies |= {
        "fails": "raise KeyError('colour')",
        "unsteady": "global count; count += 1; return image // (1 + count % 5)",
    }
    (lab.folder / "own.py").write_text("\n".join(code.format(name, body) for name, body in bodies.items()))
    for name in bodies:
        done = lab.warmup(lab.shared.photos(), f"cache-{name}", "--variants", 1, "--augment", f"own:{name}")
        outcome = refused(done, "augment|own:", status=done.status if done.status in (1, 2) else 1)
    return outcome


@row
def photographs_removed_renamed_and_added(lab: Lab) -> Outcome:
    photos, cache = copies(lab)
    before = files_of(cache)
    gone = photos / "bee" / "0001.png"
    gone.rename(lab.folder / "0001.png")
    refused(lab.warmup(photos, cache), "0001.png")
    equal("files", files_of(cache), before)
    (lab.folder / "0001.png").rename(gone)
    (photos / "bee").rename(photos / "wasp")
    refused(lab.warmup(photos, cache), "bee")
    (photos / "wasp").rename(photos / "bee")
    write_photos(photos, 6, first=COUNT)
    succeeded(lab.warmup(photos, cache))
    return correct("less is refused, more is added: " + check_photos(CachedDataset(cache), class_of, range(COUNT + 6)))


@row
def a_class_added_before_the_others(lab: Lab) -> Outcome:
    photos, cache = copies(lab)
    write_photos(photos, 3, ("aardvark",), first=COUNT)
    done = lab.warmup(photos, cache)
    if done.status:
        return refused(done, "class|aardvark")
    names = {n: class_of(n) if n < COUNT else "aardvark" for n in range(COUNT + 3)}
    return correct(check_photos(CachedDataset(cache), names.__getitem__, names))


@row
def another_label_or_fold_column_for_a_finished_cache(lab: Lab) -> Outcome:
    table = [{**r, "fold2": n % 2, "other": CLASSES[(n + 1) % 3]} for n, r in enumerate(rows())]
    path = write_csv(lab.folder / "table.csv", table)
    words = [path, lab.folder / "cache", "--root", lab.shared.photos()]
    succeeded(lab.warmup(*words, "--label-col", "label", "--fold-col", "fold"))
    before = files_of(lab.folder / "cache")
    refused(lab.warmup(*words, "--label-col", "label", "--fold-col", "fold2"), "fold")
    refused(lab.warmup(*words), "label")
    outcome = refused(lab.warmup(*words, "--label-col", "other", "--fold-col", "fold"), "label")
    equal("files", files_of(lab.folder / "cache"), before)
    return outcome


@row
def labels_of_a_table_changed_after_the_cache_was_finished(lab: Lab) -> Outcome:
    path = write_csv(lab.folder / "table.csv", rows())
    words = [path, lab.folder / "cache", "--root", lab.shared.photos(), "--label-col", "label"]
    succeeded(lab.warmup(*words))
    write_csv(path, [{**r, "label": CLASSES[(n + 1) % 3]} for n, r in enumerate(rows())])
    return refused(lab.warmup(*words), "label")


@row
def a_finished_cache_that_lacks_a_shard(lab: Lab) -> Outcome:
    photos, cache = copies(lab)
    (cache / "v00-00000.lmdb").unlink()
    return refused(lab.warmup(photos, cache), "v00-00000.lmdb")


@row
def a_time_limit_of_nothing(lab: Lab) -> Outcome:
    done = lab.warmup(lab.shared.photos(), "cache", "--time-limit", 0)
    outcome = refused(done, "time|limit|run", status=done.status if done.status in (2, 3) else 3)
    for wrong in ("-1", "soon", "", "1.5h", "nan"):
        refused(lab.warmup(lab.shared.photos(), "cache", f"--time-limit={wrong}"), "time", status=2)
    succeeded(lab.warmup(lab.shared.photos(), "cache"))
    check_photos(CachedDataset("cache"), class_of, range(COUNT))
    return outcome


@row
def time_limits_of_no_length_from_Python(lab: Lab) -> Outcome:
    try:
        build_cache(lab.shared.photos(), lab.folder / "cache", Recipe(size=SIDE), jobs=1, time_limit=0)
    except UnfinishedError as error:
        message = str(error)
    else:
        raise Wrong("0 seconds were enough")
    build_cache(str(lab.shared.photos()), str(lab.folder / "cache"), Recipe(size=SIDE), jobs=1, time_limit=1e9)
    return correct(
        f"stopped ({message[:60]} …), then finished: " + check_photos(CachedDataset("cache"), class_of, range(COUNT))
    )


@row
def killed_at_random_moments_and_run_again(lab: Lab) -> Outcome:
    kills = 0
    for number in range(12):
        running = lab.start("warmup", lab.shared.photos(), "cache", "--size", SIDE, "--jobs", 1, *INVERT)
        time.sleep(0.03 + 0.03 * number)
        running.signal(signal.SIGKILL)
        kills += running.wait().status == -signal.SIGKILL
    succeeded(lab.warmup(lab.shared.photos(), "cache", *INVERT))
    equal("files", _content(lab.folder / "cache"), _content(lab.shared.augmented()))
    return correct(f"after {kills} kills the files are those of an undisturbed run, to the byte")


@row
def another_source_or_recipe_for_an_unfinished_cache(lab: Lab) -> Outcome:
    cache = lab.folder / "cache"
    unfinished(lab, cache)
    refused(lab.warmup(lab.shared.photos(), cache, "--fit", "pad"), "fit")
    outcome = refused(lab.warmup(write_photos(lab.folder / "others", 9, ("x", "y")), cache))
    succeeded(lab.warmup(lab.shared.photos(), cache, "--augment", "lab_module:invert", "--variants", 2))
    check_photos(CachedDataset(cache), class_of, range(COUNT))
    return outcome


@row
def photographs_that_change_while_a_cache_is_unfinished(lab: Lab) -> Outcome:
    photos, cache = lab.copy(lab.shared.photos(), "photos"), lab.folder / "cache"
    unfinished(lab, cache, photos)
    shutil.copy(lab.shared.photos() / "ant" / "0003.png", photos / "ant" / "0000.png")
    os.utime(photos / "ant" / "0000.png", (1, 1))
    done = lab.warmup(photos, cache, *INVERT)
    if done.status:
        return refused(done, "0000.png")
    paths = CachedDataset(cache).paths
    variants = [CachedDataset(cache, variant)[paths.index("ant/0000.png")][0] for variant in (0, 1)]
    true("both variants are of one picture", bool((variants[0] + variants[1] == 255).all()))
    return correct("the clean and the augmented record are of one picture")


@row
def two_runs_into_one_cache_at_once(lab: Lab) -> Outcome:
    words = ["warmup", lab.shared.photos(), lab.folder / "cache", "--size", SIDE, "--jobs", 1, *INVERT]
    both = [lab.start(*words) for _ in range(2)]
    ends = [running.wait() for running in both]
    for done in ends:
        if done.status:
            refused(done, "cache|another|run")
    true(f"one of them succeeded: {ends}", any(not done.status for done in ends))
    equal("files", _content(lab.folder / "cache"), _content(lab.shared.augmented()))
    return correct(f"exit statuses {[done.status for done in ends]}; the cache is that of a single run")


def unfinished(lab: Lab, cache: Path, photos: Path | None = None) -> None:
    """Leave a cache in the middle of its making, which kills itself."""
    done = lab.warmup(photos or lab.shared.photos(), cache, *INVERT, before=lambda: os.environ.update(LAB_KILL_AT="30"))
    equal("exit status", done.status, -signal.SIGKILL)
    true("the cache is begun and not finished", any(cache.iterdir()) and not (cache / "manifest.json").exists())


def _content(cache: Path) -> dict[str, str]:
    """Return the files but the manifest, which tells when it was made."""
    return {name: digest for name, digest in files_of(cache).items() if name != "manifest.json"}
