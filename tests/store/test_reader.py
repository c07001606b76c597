"""Records come back by their index rows, from many threads, without lmdb; a damaged file is an error with its name."""

from __future__ import annotations

import functools
import os
import pickle
import random
import resource
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from opened import open_files
from thorough import thorough
from written import npy

from tpucache.errors import DamageError, StoreError
from tpucache.store.cache import Cache
from tpucache.store.format import INDEX_DTYPE, shard_name
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.reader import Numbers, Rows, ShardReader, _extents
from tpucache.store.verify import verify_cache

Records = tuple[list[bytes], list[bytes]]
WriteCache = Callable[..., Manifest]
ReplaceTable = Callable[[str, bytes], None]

MANY = 300
ALL_OPEN = 256


def opened(cache: Path) -> tuple[ShardReader, Rows]:
    manifest = Manifest.load(cache)
    return ShardReader(cache, manifest.shards), Cache(cache, manifest).index.read_all()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ShardEntry], Rows]:
    """More files than a reader keeps open, each with three records that tell their place."""
    directory = tmp_path_factory.mktemp("many")
    entries, rows = [], []
    for number in range(MANY):
        name = shard_name(0, number)
        records = [b"%06d" % (10 * number + at) for at in range(3)]
        (directory / name).write_bytes(b"".join(records))
        entries.append(ShardEntry(name, 18, "0" * 64, 0, number, 3 * number, 3, "0" * 64))
        rows += [(6 * at, 6, zlib.crc32(record), number) for at, record in enumerate(records)]
    return directory, entries, np.array(rows, INDEX_DTYPE)


@pytest.mark.parametrize("block", [1, 2, 5])
def test_records_of_any_length_come_back(
    tmp_path: Path, write_cache: WriteCache, records_of: Callable[..., list[bytes]], block: int
) -> None:
    records = [b"", *records_of([0, 1, 2000, 2030, 20_000, 300_000]), b""]
    write_cache(tmp_path, [records], block)
    reader, index = opened(tmp_path)
    assert [bytes(reader.read(row)) for row in index] == records


def test_records_scatter_into_buffers_in_the_order_of_their_rows(cache: Path, records: Records) -> None:
    reader, index = opened(cache)
    order = [9, 0, 15, 3]
    everything = [*records[0], *records[1]]
    buffers = [[bytearray(4), bytearray(int(index[at]["length"]) - 4)] for at in order]
    reader.scatter(index[order], [[memoryview(part) for part in parts] for parts in buffers])
    assert [b"".join(parts) for parts in buffers] == [everything[at] for at in order]


def test_a_pickled_or_closed_reader_is_small_and_reads_again(cache: Path, records: Records) -> None:
    reader, index = opened(cache)
    before = pickle.dumps(reader)
    reader.read(index[0])
    assert pickle.dumps(reader) == before
    reader.close()
    for copied in (reader, pickle.loads(before)):
        assert [bytes(copied.read(row)) for row in index] == [*records[0], *records[1]]


@pytest.mark.slow
def test_at_most_256_files_stay_open(many: tuple[Path, list[ShardEntry], Rows]) -> None:
    directory, entries, rows = many
    reader, before = ShardReader(directory, entries), len([*Path("/proc/self/fd").iterdir()])
    for row in rows:
        reader.read(row)
        assert len([*Path("/proc/self/fd").iterdir()]) - before <= ALL_OPEN
    assert len(open_files(directory)) == ALL_OPEN


@pytest.mark.slow
def test_many_threads_share_a_reader_of_more_files_than_it_keeps(many: tuple[Path, list[ShardEntry], Rows]) -> None:
    directory, entries, rows = many
    reader = ShardReader(directory, entries)

    def read(seed: int) -> bool:
        order = list(range(len(rows)))
        random.Random(seed).shuffle(order)
        return all(bytes(reader.read(rows[at])) == b"%06d" % (at // 3 * 10 + at % 3) for at in order)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(16)))
    assert len(open_files(directory)) == ALL_OPEN


def resize(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size + by)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (Path.unlink, r" cannot be opened.*No such file.*verify"),
        (make_folder, ""),
        *(
            (functools.partial(resize, by=by), r" is [0-9,]+ bytes.* says [0-9,]+.*verify")
            for by in (-1, 1, -4096, 4096)
        ),
    ],
)
def test_a_shard_that_is_no_more_what_it_was_is_damage_with_its_name(
    cache: Path, records: Records, change: Callable[[Path], object], reason: str
) -> None:
    reader, index = opened(cache)
    change(cache / "v00-00001.lmdb")
    with pytest.raises(DamageError, match=rf"v00-00001\.lmdb{reason}"):
        reader.scatter(index[[0, 3]], [[memoryview(bytearray(int(index[at]["length"])))] for at in (0, 3)])
    assert bytes(reader.read(index[0])) == records[0][0]


def test_a_shard_cut_short_while_it_is_open_is_damage_and_not_a_crash(cache: Path) -> None:
    reader, index = opened(cache)
    reader.read(index[3])
    os.truncate(cache / "v00-00001.lmdb", 4096)
    with pytest.raises(DamageError, match=r"v00-00001\.lmdb ends before byte"):
        reader.read(index[3])


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("shard", [6, 7, 2**32 - 1], r"index of .* points at shard \d+ of 6"),
        ("offset", [2**20, 2**62, 2**63, 2**64 - 1], r"v00-00001\.lmdb"),
    ],
)
def test_a_row_that_points_at_nothing_is_refused(cache: Path, column: str, values: list[int], reason: str) -> None:
    reader, index = opened(cache)
    row = index[3].copy()
    for row[column] in values:
        with pytest.raises(StoreError, match=reason):
            reader.read(row)


def test_a_hint_changes_nothing_that_is_read(cache: Path, records: Records) -> None:
    reader, index = opened(cache)
    reader.hint(index[[12, 3, 4, 0]])
    reader.hint(index[:0])
    assert [bytes(reader.read(row)) for row in index] == [*records[0], *records[1]]


def test_a_hint_asks_for_neighbours_together_and_for_every_byte(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda number, start, length, advice: asked.append((start, length)))
    monkeypatch.setattr(ShardReader, "is_in_memory", lambda self, shard, offset: False)
    reader, index = opened(cache)
    asked.clear()
    reader.hint(index[[4, 3]])
    ((start, length),) = asked
    assert start == index["offset"][3:5].min()
    assert start + length == (index["offset"] + index["length"])[3:5].max()


def test_records_of_one_shard_with_less_than_64_kib_between_them_are_one_stretch() -> None:
    near = 250 + (64 << 10)
    far = near + 10 + (64 << 10) + 1
    places = [(1, 10, 5), (0, 200, 50), (0, 0, 100), (0, near, 10), (0, far, 7), (2, 15, 1)]
    rows = np.zeros(len(places), INDEX_DTYPE)
    rows["shard"], rows["offset"], rows["length"] = np.array(places).T
    assert list(_extents(rows)) == [(0, 0, near + 10), (0, far, far + 7), (1, 10, 15), (2, 15, 16)]


def test_the_index_has_a_row_a_record_and_is_not_for_writing(cache: Path, records: Records) -> None:
    _, index = opened(cache)
    assert index.dtype == INDEX_DTYPE
    assert index["length"].tolist() == [len(record) for variant in records for record in variant]
    assert not index.flags.writeable


@pytest.mark.parametrize(
    "content",
    [
        npy(np.zeros(15, INDEX_DTYPE)),
        npy(np.zeros(17, INDEX_DTYPE)),
        npy(np.zeros((16, 1), INDEX_DTYPE)),
        npy(np.zeros(16, INDEX_DTYPE.newbyteorder(">"))),
        npy(np.zeros(16, "<u8")),
        npy(np.array([{}] * 16, object)),
        npy(np.zeros(16, INDEX_DTYPE))[:-20],
        b"",
        bytes(500),
        pickle.dumps([1, 2, 3]),
    ],
    ids=["fewer", "more", "square", "big-endian", "numbers", "objects", "short", "empty", "zeros", "pickle"],
)
def test_an_index_that_no_writer_writes_is_refused(cache: Path, replace_table: ReplaceTable, content: bytes) -> None:
    replace_table("index.npy", content)
    with pytest.raises(StoreError, match=r"index\.npy"):
        opened(cache)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (Path.unlink, "cannot be read"),
        *((functools.partial(resize, by=by), r"is \d+ bytes, the manifest says \d+") for by in (-1, 1, -20)),
    ],
)
def test_an_index_of_another_size_is_damage(cache: Path, change: Callable[[Path], object], reason: str) -> None:
    change(cache / "index.npy")
    with pytest.raises(DamageError, match=rf"index\.npy {reason}"):
        opened(cache)


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, *thorough(1)])
def test_a_flipped_bit_of_the_indexs_header_raises_nothing_but_store_errors(cache: Path, step: int) -> None:
    path = cache / "index.npy"
    data = path.read_bytes()
    for bit in range(0, 8 * 128, step):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with suppress(StoreError):
            opened(cache)


READ_ALL = """
import zlib
from tpucache.store.cache import Cache
cache = Cache.open(sys.argv[1])
for row in cache.index.read_all():
    print(zlib.crc32(cache.reader.read(row)) == row["crc32"])
print(sorted({"lmdb", "torch", "PIL"} & {name for name, module in sys.modules.items() if module}))
"""


@pytest.mark.slow
def test_a_process_that_cannot_import_lmdb_reads_every_record(
    cache: Path, run_without_lmdb: Callable[..., str]
) -> None:
    assert run_without_lmdb(READ_ALL, cache).split("\n") == ["True"] * 16 + ["[]", ""]


def use_of(cache: Path) -> dict[str, Callable[[], object]]:
    """Return each way of opening a file of a cache."""
    manifest = Manifest.load(cache)
    index = Cache(cache, manifest).index.read_all()
    return {
        "manifest": lambda: Manifest.load(cache),
        "index": lambda: Cache.open(cache).index,
        "samples": lambda: Cache.open(cache).samples,
        "shard": lambda: ShardReader(cache, manifest.shards).read(index[0]),
        "verify": lambda: verify_cache(cache),
    }


@pytest.mark.parametrize("name", ["manifest", "index", "samples", "shard", "verify"])
def test_too_many_open_files_are_no_damage(cache: Path, name: str) -> None:
    use = use_of(cache)[name]
    use()  # whatever it imports is imported now
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(StoreError, match=r"not damaged: too many files.*ulimit -n") as caught:
            use()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert type(caught.value) is StoreError
    use()


def test_a_shard_of_the_same_size_that_holds_others_records_is_damage(cache: Path, records: Records) -> None:
    """As where two caches' files, or two variants', were mixed."""
    manifest = Manifest.load(cache)
    names = [entry.name for entry in manifest.shards if entry.block == 0]
    assert len({(cache / name).stat().st_size for name in names}) == 1
    contents = [(cache / name).read_bytes() for name in names]
    for name, content in zip(names, reversed(contents), strict=True):
        (cache / name).write_bytes(content)
    reader, index = opened(cache)
    for row in (index[0], index[2], index[8]):
        with pytest.raises(DamageError, match=r"v0\d-00000.lmdb .* other records than the index lists"):
            reader.read(row)
    assert bytes(reader.read(index[3])) == records[0][3]


def test_a_shard_is_proven_again_when_it_is_opened_again(cache: Path) -> None:
    reader, index = opened(cache)
    reader.read(index[0])
    path = cache / Manifest.load(cache).shards[0].name
    path.write_bytes(path.read_bytes()[::-1])
    reader.close()
    with pytest.raises(DamageError, match="other records"):
        reader.read(index[0])


def test_records_are_read_in_another_way_once_their_shards_are_proven(cache: Path) -> None:
    reader, index = opened(cache)
    rows = index[[0, 8, 1]]
    asked = []

    def read(descriptors: Numbers, rows: Rows) -> int:
        asked.append([os.pread(number, 4, 0) for number in descriptors.tolist()])
        assert (descriptors == [reader.file(shard).number for shard in rows["shard"].tolist()]).all()
        return 2

    assert reader.read_by(rows, read) == 0
    for row in rows[:2]:
        reader.read(row)
        assert reader.read_by(rows[:1], read) == 2
    assert reader.read_by(rows, read) == 2
    assert [len(each) for each in asked] == [1, 1, 3]
    reader.close()
    assert reader.read_by(rows, read) == 0
