"""verify finds every kind of damage, names the file and the samples, and stays silent about a sound cache."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from thorough import thorough
from written import npy

from tpucache.errors import DamageError, FormatError, StoreError
from tpucache.store.cache import Cache
from tpucache.store.format import INDEX_DTYPE, TIMES_NAME
from tpucache.store.hashes import Hashes, check_hashes, hashes_name, keep_hashes
from tpucache.store.history import check_times, note_time, read_times
from tpucache.store.manifest import Manifest
from tpucache.store.samples import Strings, encode_columns
from tpucache.store.verify import Damage, verify_cache

Numbers = tuple[int, ...]
WriteCache = Callable[..., Manifest]
ReplaceTable = Callable[[str, bytes], None]

SHARDS = [f"v{variant:02d}-{block:05d}.lmdb" for variant in (0, 1) for block in (0, 1, 2)]


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def only(damages: list[Damage]) -> Damage:
    (damage,) = damages
    return damage


def names(damages: list[Damage]) -> list[str]:
    return [damage.name for damage in damages]


@pytest.mark.parametrize("position", range(16))
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_found_and_named(cache: Path, numbers: Numbers, position: int, bit: int) -> None:
    manifest = Manifest.load(cache)
    row = Cache(cache, manifest).index.read_all()[position]
    name = manifest.shards[row["shard"]].name
    flip(cache / name, int(row["offset"]) + int(row["length"]) * bit // 8, bit)
    damages = verify_cache(cache)
    number = numbers[position % 8]
    assert damages == [
        Damage(name, "has another SHA-256 than the manifest says"),
        Damage(name, f"has damaged records: sample {number}", (number,)),
    ]


def test_a_flipped_bit_of_a_tree_page_or_between_records_names_the_shard(cache: Path) -> None:
    for at in (0, 16, 2 * 4096 + 10, 2 * 4096 + 16, -1):
        flip(cache / SHARDS[4], at)
        damages = verify_cache(cache)
        assert set(names(damages)) == {SHARDS[4]}
        assert "SHA-256" in damages[0].reason
        flip(cache / SHARDS[4], at)


@pytest.mark.parametrize("name", [*SHARDS, "index.npy", "samples.npz"])
def test_a_file_of_another_size_or_none_is_found_and_named(cache: Path, name: str) -> None:
    path = cache / name
    size = path.stat().st_size
    for other in (size - 1, size + 1):
        os.truncate(path, other)
        assert only(verify_cache(cache)) == Damage(name, f"is {other:,} bytes, the manifest says {size:,}")
    path.unlink()
    assert only(verify_cache(cache)) == Damage(name, "is missing")


@pytest.mark.parametrize("name", ["index.npy", "samples.npz"])
def test_a_flipped_bit_of_a_table_is_found_and_named(cache: Path, name: str) -> None:
    size = (cache / name).stat().st_size
    for at in range(0, size, size // 9):
        flip(cache / name, at)
        assert only(verify_cache(cache)) == Damage(name, "has another SHA-256 than the manifest says")
        flip(cache / name, at)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 3), (1, 3)])
def test_each_of_two_swapped_shards_tells_which_it_holds(cache: Path, one: int, other: int) -> None:
    paths = [cache / SHARDS[one], cache / SHARDS[other]]
    contents = [path.read_bytes() for path in paths]
    assert len(contents[0]) == len(contents[1])
    paths[0].write_bytes(contents[1])
    paths[1].write_bytes(contents[0])
    damages = verify_cache(cache)
    said = {(damage.name, damage.reason.partition(", it holds the bytes of ")[2]) for damage in damages}
    assert {(SHARDS[one], SHARDS[other]), (SHARDS[other], SHARDS[one])} <= said
    assert set(names(damages)) == {SHARDS[one], SHARDS[other]}


def test_all_damage_is_reported_tables_first_then_shards_in_order(cache: Path) -> None:
    (cache / SHARDS[5]).unlink()
    os.truncate(cache / SHARDS[2], 100)
    (cache / SHARDS[0]).unlink()
    flip(cache / "samples.npz", 0)
    (cache / "index.npy").unlink()
    flip(cache / SHARDS[3], -1)
    before = {path.name: path.read_bytes() for path in cache.iterdir()}
    assert names(verify_cache(cache)) == ["index.npy", "samples.npz", *(SHARDS[at] for at in (0, 2, 3, 5))]
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == before


def test_many_damaged_records_are_counted_and_all_are_listed(
    tmp_path: Path, write_cache: WriteCache, records_of: Callable[..., list[bytes]]
) -> None:
    manifest = write_cache(tmp_path, [records_of([3000] * 8)], 8)
    for row in Cache(tmp_path, manifest).index.read_all()[1:]:
        flip(tmp_path / SHARDS[0], int(row["offset"]))
    assert verify_cache(tmp_path)[1] == Damage(
        SHARDS[0], "has damaged records: sample 1, 2, 3, 4, 5 and 2 more", (1, 2, 3, 4, 5, 6, 7)
    )


LYING = Damage(SHARDS[1], "holds other records than the index and the samples table say")


@pytest.mark.parametrize(
    ("column", "expected"),
    [*((name, LYING) for name in ("offset", "length", "shard")), ("crc32", Damage(SHARDS[1], "sample 7", (7,)))],
)
def test_an_index_that_lies_about_a_record_is_found(
    cache: Path, replace_table: ReplaceTable, column: str, expected: Damage
) -> None:
    index = np.array(Cache(cache, Manifest.load(cache)).index.read_all())
    index[column][4] += 1
    replace_table("index.npy", npy(index))
    found = only(verify_cache(cache))
    assert (found.name, found.samples) == (expected.name, expected.samples)
    assert expected.reason in found.reason


PATHS = {"path": Strings.pack([""] * 8)}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (npy(np.zeros(3, INDEX_DTYPE)), ["index.npy"]),
        (encode_columns({"number": np.arange(3, dtype=np.uint64)}), ["samples.npz"]),
        (
            encode_columns({**PATHS, "number": np.array([0, 1, 5, 6, 8, 300, 301, 70_000], np.uint64)}),
            [SHARDS[1], SHARDS[4]],
        ),
        (encode_columns(PATHS), ["samples.npz"]),
        (encode_columns({**PATHS, "number": np.full(8, -1)}), ["samples.npz"]),
        (encode_columns({**PATHS, "number": np.full(8, np.nan)}), ["samples.npz"]),
    ],
    ids=["few-rows", "few-samples", "other-numbers", "no-numbers", "negative", "nan"],
)
def test_a_table_that_does_not_fit_is_named(
    cache: Path, replace_table: ReplaceTable, data: bytes, expected: list[str]
) -> None:
    replace_table("index.npy" if data.startswith(b"\x93NUMPY") else "samples.npz", data)
    assert {*expected} <= {*names(verify_cache(cache))} <= {*expected, *SHARDS}


VERIFY = """
from pathlib import Path
from tpucache.store.verify import verify_cache
for directory in sys.argv[1:]:
    for damage in verify_cache(Path(directory)):
        print(damage.name, *damage.samples)
"""


@pytest.mark.slow
def test_a_process_that_cannot_import_lmdb_verifies(
    cache: Path, tmp_path: Path, run_without_lmdb: Callable[..., str], numbers: Numbers
) -> None:
    sound = shutil.copytree(cache, tmp_path / "sound")
    row = Cache(cache, Manifest.load(cache)).index.read_all()[5]
    flip(cache / SHARDS[1], int(row["offset"]))
    assert run_without_lmdb(VERIFY, sound, cache).splitlines() == [SHARDS[1], f"{SHARDS[1]} {numbers[5]}"]


def rewrite(cache: Path, **changes: object) -> None:
    dataclasses.replace(Manifest.load(cache), **changes).save(cache)


def test_a_digest_of_records_that_is_not_theirs_is_found(cache: Path) -> None:
    shards = Manifest.load(cache).shards
    rewrite(cache, shards=(dataclasses.replace(shards[0], records_sha256="1" * 64), *shards[1:]))
    assert only(verify_cache(cache)) == Damage(shards[0].name, "has records of another SHA-256 than the manifest says")


def times_of(cache: Path) -> Path:
    """Write the file of the times of a cache's versions, and return its path."""
    note_time(cache, Manifest.load(cache))
    return cache / TIMES_NAME


def hashes_of(cache: Path) -> Path:
    """Write the file of perceptual hashes that fit a cache's samples, and return its path."""
    opened, draw = Cache.open(cache), np.random.default_rng(0)
    samples = opened.manifest.samples
    words = draw.integers(0, 1 << 60, (2, samples, 4), np.uint64)
    is_blank = np.zeros(samples, np.bool_)
    keep_hashes(opened, Hashes(opened.samples.numbers, words[0], words[1], is_blank))
    return cache / hashes_name(opened.manifest)


def test_a_sound_cache_has_no_damage(cache: Path, tmp_path: Path, write_cache: WriteCache) -> None:
    times_of(cache), hashes_of(cache)
    assert verify_cache(cache) == []
    write_cache(tmp_path, [[b"", b"x", b"", b""]])
    assert verify_cache(tmp_path) == []


@pytest.mark.parametrize("step", [5, *thorough(1)])
def test_flipped_bits_of_the_times_are_found(cache: Path, step: int) -> None:
    path = times_of(cache)
    for bit in range(0, 8 * path.stat().st_size, step):
        flip(path, bit // 8, bit % 8)
        with pytest.raises((DamageError, FormatError)):
            check_times(cache)
        assert not read_times(cache), "a time that may be wrong is shown"
        flip(path, bit // 8, bit % 8)
    check_times(cache)
    flip(path, 30)
    assert only(verify_cache(cache)).name == TIMES_NAME


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\0", '{"format": "tpucache times", "times": 1}', "{" * 5000])
def test_a_file_that_is_none_of_times_is_damage(cache: Path, text: str) -> None:
    (cache / TIMES_NAME).write_text(text)
    assert only(verify_cache(cache)).name == TIMES_NAME


@pytest.mark.parametrize("step", [61, *thorough(1)])
def test_flipped_bits_of_the_hashes_are_found(cache: Path, step: int) -> None:
    path = hashes_of(cache)
    opened = Cache.open(cache)
    for bit in range(0, 8 * path.stat().st_size, step):
        flip(path, bit // 8, bit % 8)
        with pytest.raises(StoreError):
            check_hashes(opened)
        flip(path, bit // 8, bit % 8)
    check_hashes(opened)
    flip(path, 0)
    assert only(verify_cache(cache)).name == path.name


def test_what_stands_behind_the_hashes_is_damage(cache: Path) -> None:
    path = hashes_of(cache)
    path.write_bytes(path.read_bytes() + b"\0")
    assert only(verify_cache(cache)).name == path.name
