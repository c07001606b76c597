"""Damaged, exchanged and hostile files."""

from __future__ import annotations

import shutil

from lab import (
    COUNT,
    check_photos,
    class_of,
    write_photos,
)
from refusals import assert_refused, refuses, succeeded

from tpucache import CachedDataset, TpucacheError


def test_the_index_of_another_cache(lab):
    """The other cache holds as many photographs, so that its index has the same size."""
    cache, other = lab.copy(lab.shared.cache), lab.folder / "other"
    succeeded(lab.warmup(write_photos(lab.folder / "photos", first=COUNT), other))
    shutil.copy(other / "index.npy", cache)
    assert_refused(lab.command("verify", cache), "index.npy", "copy")
    with refuses(TpucacheError, "index|copy"):
        check_photos(CachedDataset(cache), class_of, range(COUNT))
