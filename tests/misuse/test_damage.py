"""Damaged, exchanged and hostile files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

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

from tpucache import CachedDataset, CachedLoader, TpucacheError, verify_cache

SHARD = "v00-00000.lmdb"


def damaged(lab: Lab, name: str, number: int = 0) -> Path:
    """Return a copied cache of which one file is damaged: cut, emptied, flipped or removed."""
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
    """Read all that a cache holds."""
    check_photos(CachedDataset(cache), class_of, range(COUNT))
    list(CachedLoader(CachedDataset(cache, "epoch"), 5))


def test_each_file_cut_short_emptied_removed_or_longer(lab):
    for name in (SHARD, "index.npy", "samples.npz"):
        for number in (0, 1, 2, 4):
            cache = damaged(lab, name, number)
            with refuses(TpucacheError, name):
                read_all(cache)
            assert_refused(lab.command("verify", cache), name, "repair|copy")
            shutil.rmtree(cache)


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


def test_the_manifest_of_another_cache_of_the_same_photographs(lab):
    cache = lab.copy(lab.shared.cache)
    shutil.copy(lab.shared.relabelled / "manifest.json", cache)
    assert_refused(lab.command("verify", cache), "samples.npz", "copy")
    with refuses(TpucacheError, "samples.npz"):
        check_photos(CachedDataset(cache), class_of, range(COUNT))


def test_two_variants_shards_exchanged(lab):
    cache = lab.copy(lab.shared.augmented)
    exchange(cache / SHARD, cache / "v01-00000.lmdb")
    assert_refused(lab.command("verify", cache), SHARD, "v01-00000.lmdb")
    with refuses(TpucacheError, SHARD):
        read_all(cache)


def test_the_index_of_another_cache(lab):
    """The other cache holds as many photographs, so that its index has the same size."""
    cache, other = lab.copy(lab.shared.cache), lab.folder / "other"
    succeeded(lab.warmup(write_photos(lab.folder / "photos", first=COUNT), other))
    shutil.copy(other / "index.npy", cache)
    assert_refused(lab.command("verify", cache), "index.npy", "copy")
    with refuses(TpucacheError, "index|copy"):
        check_photos(CachedDataset(cache), class_of, range(COUNT))


def test_a_file_cut_short_while_it_is_open(lab):
    for name in (SHARD, "index.npy"):
        cache = lab.copy(lab.shared.cache, name)
        dataset = CachedDataset(cache)
        if name == SHARD:
            dataset[0]
        os.truncate(cache / name, 512)
        with refuses(TpucacheError, name):
            check_photos(dataset, class_of, range(COUNT))
    cache = lab.copy(lab.shared.cache, "table")
    dataset = CachedDataset(cache)  # it keeps the bytes of so small a table
    os.truncate(cache / "samples.npz", 512)
    check_photos(dataset, class_of, range(COUNT))


def test_further_files_in_a_caches_folder(lab):
    cache = lab.copy(lab.shared.cache)
    for name in (".DS_Store", "dataset-metadata.json", "v07-00000.lmdb", "manifest.json.bak"):
        (cache / name).write_text("{}")
    succeeded(lab.command("verify", cache))
    check_photos(CachedDataset(cache), class_of, range(COUNT))


def test_repairing_from_another_source(lab):
    cache = damaged(lab, SHARD, 2)
    before = files_of(cache)
    assert_refused(
        lab.command("verify", cache, "--repair", lab.shared.rotated, "--augment", "lab_module:invert", "--jobs", 1)
    )
    assert files_of(cache) == before


def test_repairing_from_a_source_that_changed_at_equal_size(lab):
    cache = damaged(lab, SHARD, 2)
    photos = lab.copy(lab.shared.photos, "photos")
    first, second = sorted((photos / "ant").iterdir())[:2]
    exchange_bytes(first, second)
    done = lab.command("verify", cache, "--repair", photos, "--augment", "lab_module:invert", "--jobs", 1)
    assert_refused(done, "ant|changed|differ|source|not the")
    with refuses(TpucacheError, SHARD):
        read_all(cache)


def test_a_manifest_that_is_no_JSON_of_ours(lab):
    deep = "[" * 5000 + "]" * 5000
    texts = ["", "{", "null", "[]", "{}", '{"format": 1e999}', deep, '{"a": ' + deep + "}", "\ufeff{}", "9" * 10_000]
    for text in texts:
        assert_hostile(lab, text.encode())
    assert_hostile(lab, b"\xff\xfe\x00")


def test_a_manifest_that_points_out_of_its_folder(lab):
    for name in ("../cache/v00-00000.lmdb", "/etc/passwd", "", ".", "..", "a/b", "v00-00000.lmdb\0", "a\nb"):
        manifest = lab_manifest(lab)
        manifest["shards"][0]["name"] = name
        assert_hostile(lab, json.dumps(manifest).encode())


def test_a_manifest_with_numbers_that_no_writer_writes(lab):
    for value in (-1, 0, 2**80, 1.5, "24", None, True, float("nan"), float("inf")):
        manifest = lab_manifest(lab)
        manifest["samples"] = value
        assert_hostile(lab, json.dumps(manifest).encode())
    for side in (0, -1, 2**31, "16", 16.0):
        manifest = lab_manifest(lab)
        manifest["fields"][0]["shape"] = [side, 16, 3]
        assert_hostile(lab, json.dumps(manifest).encode())


def test_a_manifest_of_a_later_version(lab):
    manifest = lab_manifest(lab)
    numbers = [key for key, value in manifest.items() if "version" in key and isinstance(value, int)]
    assert_hostile(lab, json.dumps({**manifest, numbers[0]: 99}).encode(), "version|99")


def test_a_manifest_that_names_a_shard_twice(lab):
    manifest = lab_manifest(lab)
    manifest["shards"].append(manifest["shards"][0])
    assert_hostile(lab, json.dumps(manifest).encode())


def lab_manifest(lab: Lab) -> dict[str, Any]:
    """Return the content of the shared cache's manifest."""
    return dict(json.loads((lab.shared.cache / "manifest.json").read_text()))


def assert_hostile(lab: Lab, manifest: bytes, *words: str) -> None:
    """Assert that a cache of this manifest is refused, by Python and by a command."""
    cache = lab.copy(lab.shared.cache, "hostile")
    (cache / "manifest.json").write_bytes(manifest)
    with refuses(TpucacheError, *words):
        CachedDataset(cache)
    with refuses(TpucacheError, *words):
        verify_cache(cache)
    assert_refused(lab.command("inspect", cache), *words)
    shutil.rmtree(cache)


def exchange(left: Path, right: Path) -> None:
    """Exchange two files' names."""
    aside = left.with_name("aside")
    left.rename(aside)
    right.rename(left)
    aside.rename(right)
