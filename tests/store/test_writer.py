"""A sealed shard is an ordinary LMDB file, the same bytes each time, whole or absent."""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache.errors import BuildError, UsageError
from tpucache.store import writer as writer_module
from tpucache.store.format import INDEX_DTYPE
from tpucache.store.writer import ShardInfo, ShardWriter

QUICK = settings(max_examples=25)
SIZES = st.one_of(st.integers(0, 64), st.integers(1900, 2100), st.integers(0, 20_000))
RECORDS = st.dictionaries(
    st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1)),
    st.builds(lambda size, byte: (bytes(range(256)) * 80)[byte : byte + size], SIZES, st.integers(0, 255)),
    max_size=15,
).map(lambda records: dict(sorted(records.items())))


@pytest.fixture(autouse=True)
def small_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few records fill a transaction."""
    monkeypatch.setattr(writer_module, "_BATCH_BYTES", 30_000)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "v00-00000.lmdb"


def seal(target: Path, records: dict[int, bytes]) -> ShardInfo:
    with ShardWriter(target.with_suffix(".tmp")) as writer:
        for number, record in records.items():
            writer.append(number, record)
        return writer.seal(target)


def plain_lmdb(path: Path) -> list[tuple[bytes, bytes]]:
    with (
        lmdb.open(str(path), subdir=False, readonly=True, lock=False, create=False) as env,
        env.begin() as transaction,
    ):
        return list(transaction.cursor())


@pytest.mark.slow
@QUICK
@given(records=RECORDS)
def test_the_same_records_make_the_same_file_which_lmdb_and_the_index_rows_describe(
    tmp_path_factory: pytest.TempPathFactory, records: dict[int, bytes]
) -> None:
    one, other = (tmp_path_factory.getbasetemp() / name for name in ("one.lmdb", "other.lmdb"))
    first, second = seal(one, records), seal(other, records)
    data = one.read_bytes()
    assert data == other.read_bytes()
    assert first[:3] == second[:3]
    assert np.array_equal(first.rows, second.rows)
    assert plain_lmdb(one) == [(number.to_bytes(8, "big"), record) for number, record in records.items()]
    assert first.rows.dtype == INDEX_DTYPE
    for row, record in zip(first.rows, records.values(), strict=True):
        assert data[int(row["offset"]) :][: int(row["length"])] == record
        assert row["crc32"] == zlib.crc32(record)
        assert row["shard"] == 0


def test_sealing_returns_the_size_and_the_hashes_of_the_file(target: Path) -> None:
    records = {3: b"ab", 4: b"", 9: bytes(5000)}
    sealed = seal(target, records)
    data = target.read_bytes()
    assert (sealed.bytes, sealed.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    content = b"".join(struct.pack("<QI", number, len(record)) + record for number, record in records.items())
    assert sealed.records_sha256 == hashlib.sha256(content).hexdigest()


def test_the_hash_of_records_sees_where_one_ends_and_which_key_it_has(target: Path) -> None:
    variations = [{0: b"ab", 1: b"c"}, {0: b"a", 1: b"bc"}, {0: b"ab", 2: b"c"}, {0: b"ab"}]
    assert len({seal(target, records).records_sha256 for records in variations}) == len(variations)


def test_nothing_of_an_earlier_shard_is_left_in_the_unused_bytes(tmp_path: Path) -> None:
    seal(tmp_path / "loud.lmdb", dict.fromkeys(range(20), b"\xee" * 3000))
    seal(tmp_path / "quiet.lmdb", dict.fromkeys(range(20), b"\x11" * 3000))
    assert b"\xee" * 16 not in (tmp_path / "quiet.lmdb").read_bytes()


@pytest.mark.parametrize("number", [0, 6, 7])
def test_a_key_that_does_not_ascend_is_refused(target: Path, number: int) -> None:
    with ShardWriter(target.with_suffix(".tmp")) as writer:
        writer.append(7, b"seven")
        with pytest.raises(UsageError, match=rf"sample {number} comes after sample 7"):
            writer.append(number, b"late")
        writer.append(8, b"eight")
        writer.seal(target)
    assert [value for _, value in plain_lmdb(target)] == [b"seven", b"eight"]


def test_a_number_that_no_key_holds_is_refused(target: Path) -> None:
    with ShardWriter(target) as writer, pytest.raises(UsageError):
        writer.append(2**64, b"")


def test_a_record_above_the_limit_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_RECORD_BYTES", 100)
    with ShardWriter(target) as writer:
        writer.append(0, bytes(100))
        with pytest.raises(UsageError, match="sample 1"):
            writer.append(1, bytes(101))


def test_leaving_by_an_exception_leaves_no_file(target: Path) -> None:
    def interrupted() -> None:
        with ShardWriter(target.with_suffix(".tmp")) as writer:
            writer.append(0, bytes(100_000))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(target.parent.iterdir()) == []


def test_nothing_has_the_shards_name_before_the_seal(target: Path) -> None:
    with ShardWriter(target.with_suffix(".tmp")) as writer:
        writer.append(0, bytes(100_000))
        assert not target.exists()
        writer.seal(target)
        assert target.exists()


def test_what_an_interrupted_run_left_is_replaced(target: Path) -> None:
    target.with_suffix(".tmp").write_bytes(b"half a shard")
    seal(target, {0: b"x"})
    assert [value for _, value in plain_lmdb(target)] == [b"x"]


def test_a_shard_is_sealed_once(target: Path) -> None:
    with ShardWriter(target.with_suffix(".tmp")) as writer:
        writer.append(0, b"x")
        writer.seal(target)
        with pytest.raises(UsageError, match="sealed"):
            writer.seal(target)


@pytest.mark.parametrize("size", [0, 100, 2023, 2024, 4000, 4081, 50_000])
def test_a_map_that_grows_by_single_pages_is_always_large_enough(
    target: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_MAP_STEP", 4096)
    monkeypatch.setattr(writer_module, "_BATCH_BYTES", 1 << 20)
    records = {number: bytes(size) for number in range(200)}
    seal(target, records)
    assert [value for _, value in plain_lmdb(target)] == list(records.values())


def test_a_folder_that_is_not_there_is_a_build_error(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="nowhere"):
        ShardWriter(tmp_path / "nowhere" / "shard.tmp")


def test_a_rename_that_fails_is_a_build_error_and_leaves_no_file(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "shard.tmp") as writer:
        writer.append(0, b"x")
        with pytest.raises(BuildError):
            writer.seal(tmp_path / "nowhere" / "shard.lmdb")
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_are_not_what_was_appended_are_not_sealed(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ShardWriter(target.with_suffix(".tmp")) as writer:
        writer.append(0, bytes(5000))
        monkeypatch.setattr(writer, "_crcs", [1])
        with pytest.raises(BuildError, match="record 0"):
            writer.seal(target)
    assert not target.exists()
