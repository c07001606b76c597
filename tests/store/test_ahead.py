"""Files are read ahead where storage answers late, within bounds, and what is read is the same as without."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tpucache.errors import DamageError
from tpucache.store.ahead import MOST_BYTES, FilesAhead, Lateness, WholeFile
from tpucache.store.cache import Cache
from tpucache.store.copying import stage_cache
from tpucache.store.files import CHUNK, OpenFile, sha256_of
from tpucache.store.manifest import Manifest
from tpucache.store.reader import ShardReader
from tpucache.store.verify import Damage, verify_cache

WriteCache = Callable[..., Manifest]
RecordsOf = Callable[..., list[bytes]]


@pytest.fixture
def many(tmp_path: Path, write_cache: WriteCache, records_of: RecordsOf) -> Path:
    """A cache of 20 shards."""
    (tmp_path / "many").mkdir()
    write_cache(tmp_path / "many", [records_of([9000] * 40)], 2)
    return tmp_path / "many"


def answers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all storage be taken for late once it has answered."""
    monkeypatch.setattr(Lateness, "files", property(lambda lateness: 0 if lateness._wait is None else 8))


def meets(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> threading.Event:
    """Return an event that is set once two threads call a method at the same time; a call waits a little for it."""
    met, calls, real = threading.Event(), threading.Semaphore(0), getattr(owner, name)

    def calling(*arguments: object) -> object:
        if not met.is_set() and not calls.acquire(blocking=False):
            calls.release()
            met.wait(0.5)
        elif threading.current_thread().name.startswith("tpucache-load"):
            met.set()
        return real(*arguments)

    monkeypatch.setattr(owner, name, calling)
    return met


@pytest.mark.parametrize("use", [verify_cache, lambda cache: stage_cache(cache, cache.parent / "place")])
def test_several_files_are_read_at_once_where_storage_is_late(
    many: Path, use: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers_late(monkeypatch)
    met = meets(monkeypatch, WholeFile, "read")
    use(many)
    assert met.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tpucache-load")]


def test_several_shards_are_opened_at_once_where_storage_is_late(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers_late(monkeypatch)
    met = meets(monkeypatch, ShardReader, "_open_shard")
    cache = Cache.open(many)
    cache.reader.open_all(range(20))
    assert met.is_set()


@pytest.mark.parametrize("harm", ["none", "flip", "cut", "longer", "gone", "pipe"])
@pytest.mark.parametrize("name", ["v00-00007.lmdb", "samples.npz"])
def test_the_damage_is_the_same_on_late_storage(
    many: Path, name: str, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many / name
    data = path.read_bytes()
    if harm in ("gone", "pipe"):
        path.unlink()
        if harm == "pipe":
            os.mkfifo(path)
    elif harm != "none":
        at = len(data) - 700
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        path.write_bytes({"flip": flipped, "cut": data[:-1], "longer": data + b"\0"}[harm])
    at_once = verify_cache(many)
    assert bool(at_once) == (harm != "none")
    answers_late(monkeypatch)
    assert verify_cache(many) == at_once


@pytest.mark.parametrize("late", [False, True])
def test_a_file_that_changes_while_it_is_read_is_damage_or_an_error(
    many: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is right when it is opened."""
    if late:
        answers_late(monkeypatch)
    path, real = many / "v00-00007.lmdb", WholeFile.read

    for change in (lambda: os.truncate(path, 5000), lambda: os.truncate(path, 2 * CHUNK)):
        whole = path.read_bytes()

        def read(file: WholeFile, offset: int, change: Callable[[], None] = change) -> bytes:
            with file._lock:
                if file.path == path and file._opened is None:
                    file.found, file._opened = file.size, OpenFile(path)
                    change()
            return real(file, offset)

        monkeypatch.setattr(WholeFile, "read", read)
        found = verify_cache(many)
        assert found[0] == Damage(path.name, "has another SHA-256 than the manifest says")
        path.write_bytes(whole)
        with pytest.raises(DamageError, match=r"v00-00007\.lmdb has another SHA-256"):
            stage_cache(many, many.parent / "place")
        monkeypatch.setattr(WholeFile, "read", real)
        path.write_bytes(whole)
    assert verify_cache(many) == []


def test_what_is_read_ahead_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 8 * MOST_BYTES)  # without blocks on the disk
    begun, lock, lateness = set[int](), threading.Lock(), Lateness()
    real = WholeFile.read

    def read(file: WholeFile, offset: int) -> bytes:
        with lock:
            begun.add(offset)
        return real(file, offset)

    monkeypatch.setattr(WholeFile, "read", read)
    lateness.waited(10.0)
    lateness.worked(0.001)
    file = WholeFile(path, 8 * MOST_BYTES)
    with FilesAhead([file], lateness) as files:
        for number, _ in enumerate(files.chunks(file), 1):
            assert len(begun) * CHUNK <= number * CHUNK + MOST_BYTES
            if number == 20:
                break


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
@pytest.mark.parametrize("wait", [0.0, 1.0])
def test_a_file_of_any_size_is_read_whole(tmp_path: Path, size: int, wait: float) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    (tmp_path / "file").write_bytes(data[:size])
    lateness, file = Lateness(), WholeFile(tmp_path / "file", size)
    lateness.waited(wait)
    with FilesAhead([file], lateness) as files:
        chunks = list(files.chunks(file))
    assert sha256_of(chunks) == sha256_of([data[:size]])
    assert file.found == size
