"""Sources and recipes that change, runs that are killed."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lab import (
    COUNT,
    INVERT,
    Lab,
    check_photos,
    class_of,
    exchange_bytes,
    files_of,
    write_photos,
)
from refusals import assert_refused, succeeded

from tpucache import CachedDataset


def copies(lab: Lab) -> tuple[Path, Path]:
    """Return copies of the photographs and of their cache."""
    return lab.copy(lab.shared.photos, "photos"), lab.copy(lab.shared.cache, "cache")


def test_variants_added_to_photographs_that_changed_at_equal_size(lab):
    photos, cache = copies(lab)
    first, second = sorted((photos / "ant").iterdir())[:2]
    exchange_bytes(first, second)
    os.truncate(first, (lab.shared.photos / "ant" / first.name).stat().st_size)
    os.truncate(second, (lab.shared.photos / "ant" / second.name).stat().st_size)
    done = lab.warmup(photos, cache, *INVERT)
    check_photos(CachedDataset(cache), class_of, range(COUNT))
    assert_refused(done, "ant")


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
