"""Damaged, exchanged and hostile files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from scripts.checks.misuse.lab import COUNT, Lab, check_photos, class_of, files_of, write_photos
from scripts.checks.misuse.outcome import Outcome, Wrong, correct, equal, refused, refuses, succeeded
from scripts.checks.misuse.rows import row
from scripts.checks.misuse.try_folders import flip
from tpucache import CachedDataset, CachedLoader, TpucacheError, verify_cache

SHARD = "v00-00000.lmdb"


def damaged(lab: Lab, name: str, number: int = 0) -> Path:
    """Return a copied cache of which one file is damaged: cut, emptied, flipped or removed."""
    cache = lab.copy(lab.shared.augmented(), f"damaged{number}")
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


@row
def each_file_cut_short_emptied_removed_or_longer(lab: Lab) -> Outcome:
    for name in (SHARD, "index.npy", "samples.npz"):
        for number in (0, 1, 2, 4):
            cache = damaged(lab, name, number)
            outcome = refuses(lambda cache=cache: read_all(cache), TpucacheError, name)
            refused(lab.command("verify", cache), name, "repair|copy")
            shutil.rmtree(cache)
    return outcome


@row
def one_bit_flipped_in_each_file(lab: Lab) -> Outcome:
    for name in (SHARD, "index.npy", "samples.npz"):
        cache = damaged(lab, name, 3)
        outcome = refused(lab.command("verify", cache), name, "repair|copy")
        succeeded(
            lab.command("verify", cache, "--repair", lab.shared.photos(), "--augment", "lab_module:invert", "--jobs", 1)
        )
        equal("files", files_of(cache), files_of(lab.shared.augmented()))
        shutil.rmtree(cache)
    return outcome


@row
def the_samples_of_another_cache_of_the_same_photographs(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.cache())
    shutil.copy(lab.shared.relabelled() / "samples.npz", cache)
    refused(lab.command("verify", cache), "samples.npz", "copy")
    return refuses(lambda: check_photos(CachedDataset(cache), class_of, range(COUNT)), TpucacheError, "samples.npz")


@row
def the_manifest_of_another_cache_of_the_same_photographs(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.cache())
    shutil.copy(lab.shared.relabelled() / "manifest.json", cache)
    refused(lab.command("verify", cache), "samples.npz", "copy")
    return refuses(lambda: check_photos(CachedDataset(cache), class_of, range(COUNT)), TpucacheError, "samples.npz")


@row
def two_variants_shards_exchanged(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.augmented())
    exchange(cache / SHARD, cache / "v01-00000.lmdb")
    refused(lab.command("verify", cache), SHARD, "v01-00000.lmdb")
    return refuses(lambda: read_all(cache), TpucacheError, SHARD)


@row
def the_index_of_another_cache(lab: Lab) -> Outcome:
    """The other cache holds as many photographs, so that its index has the same size."""
    cache, other = lab.copy(lab.shared.cache()), lab.folder / "other"
    succeeded(lab.warmup(write_photos(lab.folder / "photos", first=COUNT), other))
    shutil.copy(other / "index.npy", cache)
    refused(lab.command("verify", cache), "index.npy", "copy")
    return refuses(lambda: check_photos(CachedDataset(cache), class_of, range(COUNT)), TpucacheError, "index|copy")


@row
def a_file_cut_short_while_it_is_open(lab: Lab) -> Outcome:
    for name in (SHARD, "index.npy", "samples.npz"):
        cache = lab.copy(lab.shared.cache(), name)
        dataset = CachedDataset(cache)
        if name == SHARD:
            dataset[0]
        os.truncate(cache / name, 512)
        outcome = refuses(lambda d=dataset: check_photos(d, class_of, range(COUNT)), TpucacheError, name)
    return outcome


@row
def further_files_in_a_caches_folder(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.cache())
    for name in (".DS_Store", "dataset-metadata.json", "v07-00000.lmdb", "manifest.json.bak"):
        (cache / name).write_text("{}")
    succeeded(lab.command("verify", cache))
    return correct(check_photos(CachedDataset(cache), class_of, range(COUNT)))


@row
def repairing_from_another_source(lab: Lab) -> Outcome:
    cache = damaged(lab, SHARD, 2)
    before = files_of(cache)
    outcome = refused(
        lab.command(
            "verify", cache, "--repair", lab.shared.folder / "rotated", "--augment", "lab_module:invert", "--jobs", 1
        )
    )
    equal("files", files_of(cache), before)
    return outcome


@row
def repairing_from_a_source_that_changed_at_equal_size(lab: Lab) -> Outcome:
    cache = damaged(lab, SHARD, 2)
    photos = lab.copy(lab.shared.photos(), "photos")
    first, second = sorted((photos / "ant").iterdir())[:2]
    exchange_bytes(first, second)
    done = lab.command("verify", cache, "--repair", photos, "--augment", "lab_module:invert", "--jobs", 1)
    outcome = refused(done, "ant|changed|differ|source|not the")
    refuses(lambda: read_all(cache), TpucacheError, SHARD)
    return outcome


@row
def a_manifest_that_is_no_JSON_of_ours(lab: Lab) -> Outcome:
    deep = "[" * 5000 + "]" * 5000
    texts = ["", "{", "null", "[]", "{}", '{"format": 1e999}', deep, '{"a": ' + deep + "}", "\ufeff{}", "9" * 10_000]
    for text in texts:
        outcome = hostile(lab, text.encode())
    hostile(lab, b"\xff\xfe\x00")
    return outcome


@row
def a_manifest_that_points_out_of_its_folder(lab: Lab) -> Outcome:
    for name in ("../cache/v00-00000.lmdb", "/etc/passwd", "", ".", "..", "a/b", "v00-00000.lmdb\0", "a\nb"):
        manifest = lab_manifest(lab)
        manifest["shards"][0]["name"] = name
        outcome = hostile(lab, json.dumps(manifest).encode())
    return outcome


@row
def a_manifest_with_numbers_that_no_writer_writes(lab: Lab) -> Outcome:
    for value in (-1, 0, 2**80, 1.5, "24", None, True, float("nan"), float("inf")):
        manifest = lab_manifest(lab)
        manifest["samples"] = value
        outcome = hostile(lab, json.dumps(manifest).encode())
    for side in (0, -1, 2**31, "16", 16.0):
        manifest = lab_manifest(lab)
        manifest["fields"][0]["shape"] = [side, 16, 3]
        outcome = hostile(lab, json.dumps(manifest).encode())
    return outcome


@row
def a_manifest_of_a_later_version(lab: Lab) -> Outcome:
    manifest = lab_manifest(lab)
    numbers = [key for key, value in manifest.items() if "version" in key and isinstance(value, int)]
    if not numbers:
        raise Wrong(f"the manifest has no number of its version: {list(manifest)}")
    return hostile(lab, json.dumps({**manifest, numbers[0]: 99}).encode(), "version|99")


@row
def a_manifest_that_names_a_shard_twice(lab: Lab) -> Outcome:
    manifest = lab_manifest(lab)
    manifest["shards"].append(manifest["shards"][0])
    return hostile(lab, json.dumps(manifest).encode())


def lab_manifest(lab: Lab) -> dict[str, Any]:
    """Return the content of the shared cache's manifest."""
    return dict(json.loads((lab.shared.cache() / "manifest.json").read_text()))


def hostile(lab: Lab, manifest: bytes, *words: str) -> Outcome:
    """Check that a cache of this manifest is refused, by Python and by three commands."""
    cache = lab.copy(lab.shared.cache(), "hostile")
    (cache / "manifest.json").write_bytes(manifest)
    refuses(lambda: CachedDataset(cache), TpucacheError, *words)
    refuses(lambda: verify_cache(cache), TpucacheError, *words)
    outcome = refused(lab.command("inspect", cache), *words)
    shutil.rmtree(cache)
    return outcome


def exchange(left: Path, right: Path) -> None:
    """Exchange two files' names."""
    aside = left.with_name("aside")
    left.rename(aside)
    right.rename(left)
    aside.rename(right)


def exchange_bytes(left: Path, right: Path) -> None:
    """Give each of two images the other's content; both keep their size, by bytes that no decoder reads."""
    contents = left.read_bytes(), right.read_bytes()
    size = max(map(len, contents))
    for path, content in zip((left, right), reversed(contents), strict=True):
        path.write_bytes(content.ljust(size, b"\0"))
