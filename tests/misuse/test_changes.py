"""Sources and recipes that change, runs that are killed."""

from __future__ import annotations

import os
from pathlib import Path

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
