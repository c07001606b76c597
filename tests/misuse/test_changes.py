"""Sources and recipes that change, runs that are killed."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lab import (
    CLASSES,
    COUNT,
    INVERT,
    MODULE,
    SIDE,
    Lab,
    check_photos,
    class_of,
    exchange_bytes,
    files_of,
    table_rows,
    write_csv,
    write_photos,
)
from refusals import assert_refused, succeeded

from tpucache import CachedDataset, Recipe, UnfinishedError, build_cache


def copies(lab: Lab) -> tuple[Path, Path]:
    """Return copies of the photographs and of their cache."""
    return lab.copy(lab.shared.photos, "photos"), lab.copy(lab.shared.cache, "cache")


def test_the_same_command_twice(lab):
    photos, cache = copies(lab)
    before = files_of(cache)
    succeeded(lab.warmup(photos, cache))
    assert files_of(cache) == before


def test_another_recipe_for_a_finished_cache(lab):
    photos, cache = copies(lab)
    before = files_of(cache)
    for words in (("--size", 8), ("--fit", "pad"), ("--codec", "png"), ("--exact",)):
        assert_refused(lab.warmup(photos, cache, *words), words[0].strip("-"), "another|same|new")
        assert files_of(cache) == before


def test_variants_added_to_photographs_that_changed_at_equal_size(lab):
    photos, cache = copies(lab)
    first, second = sorted((photos / "ant").iterdir())[:2]
    exchange_bytes(first, second)
    os.truncate(first, (lab.shared.photos / "ant" / first.name).stat().st_size)
    os.truncate(second, (lab.shared.photos / "ant" / second.name).stat().st_size)
    done = lab.warmup(photos, cache, *INVERT)
    check_photos(CachedDataset(cache), class_of, range(COUNT))
    assert_refused(done, "ant")


def test_variants_added_to_a_cache(lab):
    photos, cache = copies(lab)
    clean = {name: digest for name, digest in files_of(cache).items() if name.startswith("v00")}
    succeeded(lab.warmup(photos, cache, *INVERT))
    assert {name: digest for name, digest in files_of(cache).items() if name.startswith("v00")} == clean
    dataset, augmented = CachedDataset(cache), CachedDataset(cache, 2)
    for position in range(COUNT):
        assert (dataset[position][0] + augmented[position][0] == 255).all()
    check_photos(dataset, class_of, range(COUNT))


def test_an_augmentation_whose_code_changed(lab):
    for number, text in enumerate((MODULE.replace("255 - image", "image // 2"), "from lab_part import invert\n")):
        (lab.folder / f"own{number}.py").write_text(MODULE if not number else text)
    (lab.folder / "lab_part.py").write_text(MODULE)
    photos = lab.shared.photos
    for name, changed in (("own0", "own0.py"), ("own1", "lab_part.py")):
        cache = lab.folder / f"cache-{name}"
        succeeded(lab.warmup(photos, cache, "--variants", 1, "--augment", f"{name}:invert"))
        (lab.folder / changed).write_text(MODULE.replace("255 - image", "image // 2"))
        assert_refused(lab.warmup(photos, cache, "--variants", 2, "--augment", f"{name}:invert"))


def test_an_augmentation_that_gives_something_else(lab):
    code = "import numpy as np\ncount = 0\ndef {}(image, generator):\n    {}\n"
    bodies = {"small": "return image[:3]", "floats": "return image / 255", "none": "return None"}
    bodies |= {
        "fails": "raise KeyError('colour')",
        "unsteady": "global count; count += 1; return image // (1 + count % 5)",
    }
    (lab.folder / "own.py").write_text("\n".join(code.format(name, body) for name, body in bodies.items()))
    for name in bodies:
        done = lab.warmup(lab.shared.photos, f"cache-{name}", "--variants", 1, "--augment", f"own:{name}")
        assert_refused(done, "augment|own:")


def test_photographs_removed_renamed_and_added(lab):
    photos, cache = copies(lab)
    before = files_of(cache)
    gone = photos / "bee" / "0001.png"
    gone.rename(lab.folder / "0001.png")
    assert_refused(lab.warmup(photos, cache), "0001.png")
    assert files_of(cache) == before
    (lab.folder / "0001.png").rename(gone)
    (photos / "bee").rename(photos / "wasp")
    assert_refused(lab.warmup(photos, cache), "bee")
    (photos / "wasp").rename(photos / "bee")
    write_photos(photos, 6, first=COUNT)
    succeeded(lab.warmup(photos, cache))
    check_photos(CachedDataset(cache), class_of, range(COUNT + 6))


def test_a_class_added_before_the_others(lab):
    photos, cache = copies(lab)
    write_photos(photos, 3, ("aardvark",), first=COUNT)
    succeeded(lab.warmup(photos, cache))
    names = {n: class_of(n) if n < COUNT else "aardvark" for n in range(COUNT + 3)}
    check_photos(CachedDataset(cache), names.__getitem__, names)


def test_another_label_or_fold_column_for_a_finished_cache(lab):
    table = [{**r, "fold2": n % 2, "other": CLASSES[(n + 1) % 3]} for n, r in enumerate(table_rows())]
    path = write_csv(lab.folder / "table.csv", table)
    words = [path, lab.folder / "cache", "--root", lab.shared.photos]
    succeeded(lab.warmup(*words, "--label-col", "label", "--fold-col", "fold"))
    before = files_of(lab.folder / "cache")
    assert_refused(lab.warmup(*words, "--label-col", "label", "--fold-col", "fold2"), "fold")
    assert_refused(lab.warmup(*words), "label")
    assert_refused(lab.warmup(*words, "--label-col", "other", "--fold-col", "fold"), "label")
    assert files_of(lab.folder / "cache") == before


def test_labels_of_a_table_changed_after_the_cache_was_finished(lab):
    path = write_csv(lab.folder / "table.csv", table_rows())
    words = [path, lab.folder / "cache", "--root", lab.shared.photos, "--label-col", "label"]
    succeeded(lab.warmup(*words))
    write_csv(path, [{**r, "label": CLASSES[(n + 1) % 3]} for n, r in enumerate(table_rows())])
    assert_refused(lab.warmup(*words), "label")


def test_a_finished_cache_that_lacks_a_shard(lab):
    photos, cache = copies(lab)
    (cache / "v00-00000.lmdb").unlink()
    assert_refused(lab.warmup(photos, cache), "v00-00000.lmdb")


def test_a_time_limit_of_nothing(lab):
    done = lab.warmup(lab.shared.photos, "cache", "--time-limit", 0)
    assert_refused(done, "time|limit|run", status=3)
    for wrong in ("-1", "soon", "", "1.5h", "nan"):
        assert_refused(lab.warmup(lab.shared.photos, "cache", f"--time-limit={wrong}"), "time", status=2)
    succeeded(lab.warmup(lab.shared.photos, "cache"))
    check_photos(CachedDataset("cache"), class_of, range(COUNT))


def test_time_limits_of_no_length_from_Python(lab):
    with pytest.raises(UnfinishedError):
        build_cache(lab.shared.photos, lab.folder / "cache", Recipe(size=SIDE), jobs=1, time_limit=0)
    build_cache(str(lab.shared.photos), str(lab.folder / "cache"), Recipe(size=SIDE), jobs=1, time_limit=1e9)
    check_photos(CachedDataset("cache"), class_of, range(COUNT))


@pytest.mark.thorough
def test_another_source_or_recipe_for_an_unfinished_cache(lab, apart):
    cache = lab.folder / "cache"
    unfinished(apart, cache)
    assert_refused(lab.warmup(lab.shared.photos, cache, "--fit", "pad"), "fit")
    assert_refused(lab.warmup(write_photos(lab.folder / "others", 9, ("x", "y")), cache))
    succeeded(lab.warmup(lab.shared.photos, cache, "--augment", "lab_module:invert", "--variants", 2))
    check_photos(CachedDataset(cache), class_of, range(COUNT))


@pytest.mark.thorough
def test_photographs_that_change_while_a_cache_is_unfinished(lab, apart):
    photos, cache = lab.copy(lab.shared.photos, "photos"), lab.folder / "cache"
    unfinished(apart, cache, photos)
    shutil.copy(lab.shared.photos / "ant" / "0003.png", photos / "ant" / "0000.png")
    os.utime(photos / "ant" / "0000.png", (1, 1))
    done = lab.warmup(photos, cache, *INVERT)
    assert_refused(done, "0000.png")


@pytest.mark.thorough
def test_two_runs_into_one_cache_at_once(lab, apart):
    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(lambda _: apart.warmup(lab.shared.photos, lab.folder / "cache", *INVERT), range(2)))
    for done in ends:
        if done.status:
            assert_refused(done, "cache|another|run")
    assert any(not done.status for done in ends)
    assert _content(lab.folder / "cache") == _content(lab.shared.augmented)


def unfinished(apart: Lab, cache: Path, photos: Path | None = None) -> None:
    """Leave a cache in the middle of its making, which kills itself."""
    kill = "import os\nos.environ['LAB_KILL_AT'] = '30'"
    done = apart.warmup(photos or apart.shared.photos, cache, *INVERT, first=kill)
    assert done.status == -signal.SIGKILL
    assert any(cache.iterdir())
    assert not (cache / "manifest.json").exists()


def _content(cache: Path) -> dict[str, str]:
    """Return the files but the manifest, which tells when it was made."""
    return {name: digest for name, digest in files_of(cache).items() if name != "manifest.json"}
