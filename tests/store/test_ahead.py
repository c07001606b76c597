"""Files are read ahead where storage answers late, within bounds, and what is read is the same as without."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_answers import SlowAnswers

from tpucache import machine
from tpucache.errors import DamageError
from tpucache.store import ahead, samples
from tpucache.store.ahead import (
    MOST_BYTES,
    MOST_FILES,
    FilesAhead,
    Lateness,
    WholeFile,
    cached_for_threads,
    map_ahead,
    open_scanned,
)
from tpucache.store.cache import Cache
from tpucache.store.copying import stage_cache
from tpucache.store.files import CHUNK, OpenFile, sha256_of
from tpucache.store.index import RecordIndex
from tpucache.store.manifest import Manifest
from tpucache.store.reader import ShardReader
from tpucache.store.samples import SampleTable
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
    """Have manifests come late, so that their storage is taken for late."""
    real = Manifest.load

    def load(directory: str | Path) -> Manifest:
        for _ in range(2):
            time.sleep(0.02)
        return real(directory)

    monkeypatch.setattr(Manifest, "load", load)


def meets(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> threading.Event:
    """Return an event that is set once two threads call a method at the same time; a call waits a little for it."""
    met, calls, real = threading.Event(), threading.Semaphore(0), getattr(owner, name)

    def calling(*arguments: object, **options: object) -> object:
        if not met.is_set() and not calls.acquire(blocking=False):
            calls.release()
            met.wait(0.2)
        elif threading.current_thread().name.startswith("tpucache-load"):
            met.set()
        return real(*arguments, **options)

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

        def read(file: WholeFile, offset: int, change: Callable[[], None] = change, **options: bool) -> bytes:
            with file._lock:
                if file.path == path and file._opened is None:
                    file.found, file._opened = file.size, OpenFile(path)
                    change()
            return real(file, offset, **options)

        monkeypatch.setattr(WholeFile, "read", read)
        found = verify_cache(many)
        assert found[0] == Damage(path.name, "has another SHA-256 than the manifest says")
        path.write_bytes(whole)
        with pytest.raises(DamageError, match=r"v00-00007\.lmdb has another SHA-256"):
            stage_cache(many, many.parent / "place")
        monkeypatch.setattr(WholeFile, "read", real)
        path.write_bytes(whole)
    assert verify_cache(many) == []


@pytest.mark.parametrize("work", [0.001, 1000.0])
def test_what_is_read_ahead_is_bounded_in_bytes(tmp_path: Path, work: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """And as much as that is asked for at any time, however long the work on the last piece was."""
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 8 * MOST_BYTES)  # without blocks on the disk
    begun, lock, lateness = set[int](), threading.Lock(), Lateness()
    real = WholeFile.read

    def read(file: WholeFile, offset: int, **options: bool) -> bytes:
        with lock:
            begun.add(offset)
        return real(file, offset, **options)

    monkeypatch.setattr(WholeFile, "read", read)
    lateness.waited(10.0)
    lateness.worked(work)
    file = WholeFile(path, 8 * MOST_BYTES)
    with FilesAhead([file], lateness) as files:
        for number, _ in enumerate(files.chunks(file), 1):
            assert len(begun) * CHUNK <= number * CHUNK + MOST_BYTES
            assert (len(files._ahead) + 1) * CHUNK == MOST_BYTES
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


@pytest.fixture
def late(many: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    answers_late(monkeypatch)
    return Cache.open(many)


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="the system does not count a thread's waits")
def test_a_cache_knows_whether_its_storage_is_late_and_so_do_its_copies(late: Cache, many: Path) -> None:
    assert late.reader.is_late
    assert pickle.loads(pickle.dumps(late)).reader.is_late
    assert Lateness(late.latency).files == MOST_FILES
    assert not Cache(many, late.manifest).reader.is_late


def test_index_and_samples_table_are_opened_at_once_where_storage_is_late(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(2, timeout=60)
    for owner, name in ((RecordIndex, "_open"), (SampleTable, "__init__")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments, real=real: (meeting.wait(), real(*arguments))[1])
    cache = Cache.open(many)
    cache.latency = 1.0
    cache.open_tables()
    assert len(cache.index) == cache.manifest.samples == len(cache.samples.numbers)


def test_where_storage_is_late_records_are_asked_for_whatever_a_few_of_them_say(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(machine, "read_ahead", lambda number, offset, length: asked.append(offset))
    monkeypatch.setattr(machine, "is_in_page_cache", lambda *_: True)
    cache = Cache.open(many)
    rows = cache.index.read_all()
    asked.clear()
    cache.reader.hint(rows)
    assert not asked
    late = ShardReader(many, cache.manifest.shards, latency=1.0)
    late.hint(rows)
    assert len(asked) >= len(cache.manifest.shards)


def test_storage_that_takes_no_hints_is_read(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "no hints")

    monkeypatch.setattr(machine, "read_ahead", refuse)
    cache = Cache.open(many)
    cache.latency = 1.0
    cache.open_tables()
    assert len(cache.samples.numbers) == len(cache.index.read_all()) == 40
    answers_late(monkeypatch)
    assert verify_cache(many) == []


def test_a_small_samples_table_is_read_once_for_all_of_its_columns(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    real = samples.open_file
    monkeypatch.setattr(samples, "open_file", lambda path: (opened.append(path), real(path))[1])
    table = Cache.open(many).samples
    assert len(table.numbers) == len(table.paths)
    assert len(opened) == 1
    copied = pickle.loads(pickle.dumps(table))
    assert len(copied.numbers) == len(table.numbers)
    assert len(opened) == 2


def asking_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tpucache-ask")]


@given(count=st.integers(0, 40), late=st.sets(st.integers(0, 40)), broken=st.none() | st.integers(0, 40))
@settings(max_examples=25, deadline=None)
def test_answers_come_in_order_up_to_the_first_error_whether_storage_is_late_or_not(
    count: int, late: set[int], broken: int | None
) -> None:
    def ask(number: int) -> int:
        if number in late:
            time.sleep(0.003)
        if number == broken:
            raise OSError(errno.EIO, "broken")
        return -number

    found: list[int] = []
    is_met = broken is not None and broken < count
    with pytest.raises(OSError, match="broken") if is_met else contextlib.nullcontext():
        found.extend(map_ahead(ask, iter(range(count))))
    assert found == [-number for number in range(broken if is_met and broken is not None else count)]
    assert not asking_threads()


def test_late_storage_is_asked_for_many_answers_at_once_and_fast_storage_by_the_caller_alone() -> None:
    slow = SlowAnswers(str, together=128)
    assert list(map_ahead(slow, range(400))) == [*map(str, range(400))]
    assert slow.most == 128
    callers = set(map_ahead(lambda _: threading.get_ident(), range(3000)))
    assert threading.get_ident() in callers  # on a busy machine, one answer of many may be late
    assert not asking_threads()


def test_storage_that_is_late_for_a_while_is_asked_by_the_caller_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_CALLS_A_TRIAL", 50)
    pauses = iter([0.01])

    def ask(_: int) -> int:
        time.sleep(next(pauses, 0))
        return threading.get_ident()

    own = [found == threading.get_ident() for found in map_ahead(ask, range(60))]
    assert own[0]
    assert not any(own[1:51])
    assert own[51]


def test_only_a_bounded_number_of_answers_is_asked_for_before_they_are_taken() -> None:
    taken = SlowAnswers(abs, together=1)
    answers = map_ahead(taken, iter(range(10_000)))
    assert [next(answers) for _ in range(3)] == [0, 1, 2]
    answers.close()  # type: ignore[attr-defined]  # it is a generator
    assert taken.calls <= 132
    assert not asking_threads()


@pytest.mark.parametrize("seconds", [0.0, 0.003])
def test_a_file_that_is_scanned_has_the_same_bytes_and_late_storage_is_asked_for_more_at_once(
    tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "file", list[tuple[int, int]]()
    data = os.urandom(9 << 20)
    path.write_bytes(data)
    monkeypatch.setattr(machine, "pread", SlowAnswers(machine.pread, seconds, together=1))
    monkeypatch.setattr(ahead, "ask_for", lambda _, offset, length: asked.append((offset, length)))
    monkeypatch.setattr(ahead, "is_late", lambda waited: waited > 0.002 and seconds > 0)
    with open_scanned(path) as file:
        for offset in range(0, len(data), 100_000):
            file.seek(offset)
            assert file.read(512) == data[offset : offset + 512]
    assert bool(asked) == bool(seconds)
    assert len(asked) <= 12
    with pytest.raises(IsADirectoryError):
        open_scanned(tmp_path)


def in_threads(count: int, ask: Callable[[int], object]) -> list[object]:
    """Return what `ask` returns or raises for the numbers 0, 1, 2, …, asked by one thread each at the same time."""
    begin = threading.Barrier(count)

    def asked(number: int) -> object:
        begin.wait(60)
        try:
            return ask(number)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(asked, range(count)))


def test_threads_that_ask_at_once_get_one_value_that_was_made_once() -> None:
    calls: list[str] = []

    @cached_for_threads(2)
    def make(name: str) -> object:
        calls.append(name)
        time.sleep(0.05)
        return object()

    found = in_threads(16, lambda number: make("ab"[number % 2]))
    assert sorted(calls) == ["a", "b"]
    assert len(set(map(id, found))) == 2
    assert make("a") is found[0]


def test_an_error_is_not_kept() -> None:
    calls: list[int] = []

    @cached_for_threads(None)
    def make() -> int:
        calls.append(len(calls))
        if len(calls) < 3:
            raise ValueError("not yet")
        return calls[-1]

    found = in_threads(8, lambda _: make())
    assert sum(isinstance(each, ValueError) for each in found) == 2
    assert {each for each in found if isinstance(each, int)} == {2}
    assert len(calls) == 3


def test_only_the_values_asked_for_last_are_kept_and_none_after_clearing() -> None:
    calls: list[int] = []

    @cached_for_threads(2)
    def make(number: int) -> None:
        calls.append(number)

    for number in (0, 1, 0, 2, 0, 1):
        make(number)
    assert calls == [0, 1, 2, 1]
    make.cache_clear()
    make(1)
    assert calls == [0, 1, 2, 1, 1]
