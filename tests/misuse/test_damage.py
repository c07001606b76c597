"""Damaged, exchanged and hostile files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lab import (
    COUNT,
    Lab,
    check_photos,
    class_of,
    exchange_bytes,
    files_of,
    flip,
    write_photos,
)
from refusals import assert_refused, refuses, succeeded

from tpucache import CachedDataset, CachedLoader, TpucacheError

SHARD = "v00-00000.lmdb"


def damaged(lab: Lab, name: str, number: int = 0) -> Path:
    cache = lab.copy(lab.shared.augmented, f"damaged{number}")
    path, size = cache / name, (cache / name).stat().st_size
    match number:
        case 0:
            os.truncate(path, size - 1)
        case 1:
            os.truncate(path, 0)
        case 2:
            path.unlink()
        case 3:
            flip(path)
        case 4:
            path.write_bytes(path.read_bytes() + b"\0")
    return cache


def read_all(cache: Path) -> None:
    check_photos(CachedDataset(cache), class_of, range(COUNT))
    list(CachedLoader(CachedDataset(cache, "epoch"), 5))


def test_one_bit_flipped_in_each_file(lab):
    for name in (SHARD, "index.npy", "samples.npz"):
        cache = damaged(lab, name, 3)
        assert_refused(lab.command("verify", cache), name, "repair|copy")
        repair = ("--repair", lab.shared.photos, "--augment", "lab_module:invert", "--jobs", 1)
        if name == "samples.npz":
            assert_refused(lab.command("verify", cache, *repair), name, "copy")
        else:
            succeeded(lab.command("verify", cache, *repair))
            assert files_of(cache) == files_of(lab.shared.augmented)
        shutil.rmtree(cache)


def test_the_samples_of_another_cache_of_the_same_photographs(lab):
    cache = lab.copy(lab.shared.cache)
    shutil.copy(lab.shared.relabelled / "samples.npz", cache)
    assert_refused(lab.command("verify", cache), "samples.npz", "copy")
    with refuses(TpucacheError, "samples.npz"):
        check_photos(CachedDataset(cache), class_of, range(COUNT))


def test_the_index_of_another_cache(lab):
    """The other cache holds as many photographs, so that its index has the same size."""
    cache, other = lab.copy(lab.shared.cache), lab.folder / "other"
    succeeded(lab.warmup(write_photos(lab.folder / "photos", first=COUNT), other))
    shutil.copy(other / "index.npy", cache)
    assert_refused(lab.command("verify", cache), "index.npy", "copy")
    with refuses(TpucacheError, "index|copy"):
        check_photos(CachedDataset(cache), class_of, range(COUNT))


def test_repairing_from_a_source_that_changed_at_equal_size(lab):
    cache = damaged(lab, SHARD, 2)
    photos = lab.copy(lab.shared.photos, "photos")
    first, second = sorted((photos / "ant").iterdir())[:2]
    exchange_bytes(first, second)
    done = lab.command("verify", cache, "--repair", photos, "--augment", "lab_module:invert", "--jobs", 1)
    assert_refused(done, "ant|changed|differ|source|not the")
    with refuses(TpucacheError, SHARD):
        read_all(cache)
