"""What is read from a URL is what a local copy gives, or one clear error, whatever happens on the way."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk import SmallDisk
from patience import PATIENCE, wait_for
from servers import Server
from thorough import thorough
from work import package_lines

from tpucache import (
    CachedDataset,
    CachedLoader,
    DamageError,
    Recipe,
    StoreError,
    build_cache,
)
from tpucache.cli import main
from tpucache.insight import hashes
from tpucache.loading.ahead import ReadingThreads
from tpucache.store.hashes import kept_hashes
from tpucache.store.remote import fetch, local

Opened = Callable[..., CachedDataset]
TABLES = ("manifest.json", "index.npy", "samples.npz")


def batches(dataset: CachedDataset, epochs: int = 1, **options: object) -> list[list[object]]:
    """Return the images and labels of each batch of some epochs."""
    loader = CachedLoader(dataset, 16, **options)
    return [[images.tolist(), labels.tolist()] for _ in range(epochs) for images, labels in loader]


def parts(server: Server) -> Counter[tuple[str, int, int]]:
    """Return how often each span of a shard was asked for."""
    return Counter(each for each in server.ranges if each[0].endswith(".lmdb"))


def test_hashes_of_a_cache_at_a_url_are_those_of_a_local_copy_and_kept(opened: Opened, cache: Path) -> None:
    found = hashes(opened())
    assert np.array_equal(found.words, hashes(cache, keep=False).words)
    kept = kept_hashes(opened().cache)
    assert kept is not None
    assert np.array_equal(kept.words, found.words)


def test_a_mounted_folder_is_copied_piece_by_piece(cache: Path, small_pieces: None, tmp_path: Path) -> None:
    mounted = tmp_path / "mounted"
    mounted.symlink_to(cache)
    dataset = CachedDataset(mounted, cache_dir=tmp_path / "kept", in_memory=False)
    expected = batches(CachedDataset(cache), shuffle="block", window=32)
    assert batches(dataset, shuffle="block", window=32) == expected
    mounted.unlink()
    assert batches(dataset, shuffle="block", window=32) == expected


def test_a_cache_is_opened_by_three_requests_however_many_open_it(opened: Opened, server: Server) -> None:
    datasets = [opened() for _ in range(4)]
    assert dict(server.requests) == dict.fromkeys(TABLES, 1)
    copies = [pickle.loads(pickle.dumps(dataset)) for dataset in datasets]
    assert [copy[9][1] for copy in copies] == [datasets[0][9][1]] * 4
    assert {name: server.requests[name] for name in TABLES} == dict.fromkeys(TABLES, 1)


@pytest.mark.usefixtures("no_leases")  # what comes over a network is not mapped, and neither is the folder then
@pytest.mark.parametrize("in_memory", [False, *thorough("auto")])
def test_once_all_is_here_an_epoch_is_the_work_of_one_from_a_folder(
    opened: Opened, cache: Path, in_memory: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once what has come was compared where it lies, which the epoch after the first does."""
    monkeypatch.setattr(fetch.Fetcher, "is_busy", False)  # records are kept in memory at once
    monkeypatch.setattr(ReadingThreads, "hint", lambda _, work: work())  # an epoch may end before another thread begins
    lines = []
    for dataset in (CachedDataset(cache, in_memory=in_memory), opened(in_memory=in_memory)):
        loader = CachedLoader(dataset, 16, shuffle="block", window=32, threads=1, prefetch=0)
        assert sum(len(labels) for _, labels in loader) == 150
        if dataset.network is not None:
            # The second epoch compares records where they lie now, the third relies on that.
            monkeypatch.setattr(local, "_TICK_NS", -PATIENCE * 10**9)
            assert sum(len(labels) for _, labels in loader) == 150
            dataset.cache.reader.fetcher.close(patience=10)  # a thread that began now would be counted
            monkeypatch.setattr(fetch.Fetcher, "get", lambda *_: pytest.fail("what is here was looked for"))
        with package_lines() as each:
            assert sum(len(labels) for _, labels in loader) == 150
        lines.append(len(each))
    own, remote = lines
    # Today 23.7 a batch: each shard's file is looked at once. Nothing is done for each of its 16 records.
    assert remote <= own + 30 * len(loader)


def test_records_are_kept_in_memory_at_once_where_the_processor_has_time(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = opened().cache.reader.fetcher
    assert not fetcher.is_busy  # nothing is on its way
    fetcher._begun[0] = None
    assert not fetcher.is_busy  # the first batches are waited for
    fetcher.statistics.settled = time.monotonic() - 1e6, 5.0
    assert fetcher.is_busy
    fetcher.statistics.waited = 2e5
    assert not fetcher.is_busy  # readers wait for the network
    fetcher.statistics.waited = 5e4
    fetcher.local.is_full = True
    assert not fetcher.is_busy  # what is not kept in memory is fetched again
    for busy, expected in ((True, 0), (False, 150)):
        monkeypatch.setattr(fetch.Fetcher, "is_busy", busy)
        loader = CachedLoader(opened(in_memory="auto", cache_dir=opened().directory.parent / str(busy)), 16)
        for _ in range(2):
            before = loader.metrics()["records"]["memory"]
            deque(loader, 0)
        assert loader.metrics()["records"]["memory"] - before == expected


def test_no_more_is_kept_than_was_allowed(opened: Opened, cache: Path) -> None:
    dataset = opened(cache_bytes=30 << 10)
    assert batches(dataset, 2, shuffle=True) == batches(CachedDataset(cache), 2, shuffle=True)
    taken = sum(path.stat().st_blocks * 512 for path in dataset.directory.glob("*.lmdb"))
    assert 0 < taken <= (30 << 10) + 8192 * len([*dataset.directory.glob("*.lmdb")])


@pytest.mark.parametrize(("fault", "every"), [*thorough(("cut", 5), ("503", 5), ("whole", 5)), ("flip", 25)])
def test_every_fifth_answer_may_be_spoilt(opened: Opened, cache: Path, server: Server, fault: str, every: int) -> None:
    counter = itertools.count(1)
    server.fault = lambda name, number: fault if name not in TABLES and next(counter) % every == 0 else None
    assert batches(opened(), 2, shuffle="block") == batches(CachedDataset(cache), 2, shuffle="block")


def test_a_stalled_answer_is_given_up_and_asked_for_again(
    opened: Opened, cache: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpucache.store.remote.cache.SILENCE_SECONDS", 0.3)
    server.fault = lambda name, number: "stall" if name not in TABLES and number == 2 else None
    before = random.getstate()
    assert batches(opened()) == batches(CachedDataset(cache))
    assert random.getstate() == before  # the program's random numbers are not touched


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("403", StoreError, r"403.*The server refuses to send this file: check the URL"),
        ("flip", DamageError, r"in the record of '.*\.png' in variant 0, 3 times in a row"),
        ("503", StoreError, r"v00-00000.lmdb: HttpError: the server answers with status 503, after 7 tries"),
        ("404", StoreError, r"the server has no v00-00000.lmdb"),
    ],
)
def test_what_stays_wrong_is_one_clear_error(
    opened: Opened, server: Server, fault: str, error: type[Exception], said: str
) -> None:
    server.fault = lambda name, number: fault if name == "v00-00000.lmdb" else None
    dataset = opened()
    for _ in range(2):
        with pytest.raises(error, match=said) as caught:
            batches(dataset)
        assert not re.search(r"keys|expired|still valid|\n", str(caught.value))
    assert not any(any(path.read_bytes()) for path in dataset.directory.glob("v00-00000.lmdb"))


def test_what_goes_wrong_beside_the_network_is_an_error_and_no_wait_without_an_end(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: local.LocalCopy, piece: int) -> bool:
        raise OSError("the folder is gone")

    monkeypatch.setattr(local.LocalCopy, "lock", fail)
    dataset = opened()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"http://127.*: the folder is gone"):
            batches(dataset)


def test_a_plan_that_cannot_be_followed_changes_nothing(
    opened: Opened, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect = fetch.Fetcher.expect
    monkeypatch.setattr(fetch.Fetcher, "expect", lambda self, owner, _: expect(self, owner, (1 // 0 for _ in "a")))
    assert batches(opened(), shuffle="block") == batches(CachedDataset(cache), shuffle="block")


def test_a_shard_that_changes_while_it_is_read_is_refused(opened: Opened, server: Server, tmp_path: Path) -> None:
    server.folder = Path(shutil.copytree(server.folder, tmp_path / "copy"))
    dataset = opened()
    dataset[0]
    shard = server.folder / "v00-00000.lmdb"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match=r"was replaced on the server while it was read.*open its URL again"):
        batches(dataset)
    shard.write_bytes(shard.read_bytes() + b"more")
    with pytest.raises(StoreError, match=r"bytes on the server, the manifest says|was replaced on the server"):
        batches(opened(cache_dir=tmp_path / "other"))


@pytest.mark.parametrize("call", ["ftruncate", "writev"])
def test_a_file_that_may_not_grow_is_one_error_or_none(
    opened: Opened, cache: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Neither a sparse file (`ulimit -f`) nor one in memory: no other error leaves the reader."""
    dataset = opened()

    def refuse(*_: object) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, call, refuse)
    monkeypatch.setattr(fetch.Fetcher, "is_busy", True)
    with contextlib.suppress(StoreError):
        assert batches(dataset) == batches(CachedDataset(cache))


@pytest.mark.parametrize("room", [22, 20 << 10])  # for the first line of the state alone, or for some pieces
def test_a_full_disk_ends_keeping_with_one_warning(
    opened: Opened,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    room: int,
) -> None:
    write, left = os.pwrite, [room]

    def full(number: int, data: memoryview, offset: int) -> int:
        # Threads of a dataset that an earlier test has left may still write, too.
        is_own = Path(f"/proc/self/fd/{number}").readlink().is_relative_to(tmp_path)
        left[0] -= len(data) * is_own
        if is_own and left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(number, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING, "tpucache"):
        assert batches(opened(), 2, shuffle=True) == batches(CachedDataset(cache), 2, shuffle=True)
    assert sum("No space left" in message for message in caplog.messages) == 1


def test_without_a_network_what_is_here_is_used_with_a_warning(
    opened: Opened, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tpucache"):
        expected = batches(opened())
        assert f"{server.url}: reading version 1, " in caplog.text
        server.fault = lambda name, number: "503"
        assert batches(opened(max_age=0)) == expected
    assert any("The local copy of the manifest from an earlier time is used" in message for message in caplog.messages)


def test_a_folder_that_is_no_url_s_is_not_taken(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="Give another folder as cache_dir"):
        opened(cache_dir=tmp_path / "file")


def test_an_iteration_that_is_abandoned_leaves_nothing_that_waits(opened: Opened) -> None:
    dataset = opened(cache_bytes=0)
    for _ in range(3):
        next(iter(CachedLoader(dataset, 16, shuffle=True)))
    fetcher = dataset._open_reader.cache.reader.fetcher
    dataset.close()
    del dataset
    fetcher.close()
    for thread in fetcher._threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


SHARING = """
import json, os, sys
from tpucache import CachedDataset, CachedLoader
from tpucache.store.remote import local
local.PIECE_BYTES = 1  # one record, which is never read alone
url, folder, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
ends = []
for rank in range(count):
    out, into = os.pipe()
    if not os.fork():
        dataset = CachedDataset(url, cache_dir=folder, in_memory=False)
        loader = CachedLoader(dataset, 8, shuffle="block", window=64, rank=rank, world_size=count)
        labels = [labels.tolist() for _, labels in loader]
        sums = [int(images.sum()) for images, _ in loader]
        dataset.close()  # waits for the pieces that it has begun to fetch ahead
        os.write(into, json.dumps([labels, sums]).encode())
        os._exit(0)
    os.close(into)
    ends.append(out)
print(json.dumps([json.loads(b"".join(iter(lambda: os.read(end, 1 << 16), b""))) for end in ends]))
"""


@pytest.mark.slow
def test_processes_that_share_a_folder_fetch_each_piece_once(
    server: Server, cache: Path, tmp_path: Path, run_forking: Callable[..., str]
) -> None:
    server.delay = 0.01
    found = json.loads(run_forking(SHARING, server.url, tmp_path / "kept", 4))
    own = [
        CachedLoader(CachedDataset(cache), 8, shuffle="block", window=64, rank=rank, world_size=4) for rank in range(4)
    ]
    assert [labels for labels, _ in found] == [[labels.tolist() for _, labels in loader] for loader in own]
    assert {server.requests[name] for name in TABLES} == {1}
    assert {*parts(server).values()} == {1}


FORKED = """
import os, sys
from tpucache import CachedDataset, CachedLoader, UsageError
from tpucache.store.remote import local
local.PIECE_BYTES = 5 << 10
dataset = CachedDataset(sys.argv[1], cache_dir=sys.argv[2], in_memory=False)
own = CachedDataset(sys.argv[3], in_memory=False)
if not os.fork():
    for image, other in zip(dataset, own):
        assert image[0].equal(other[0])
    os._exit(0)
assert os.wait()[1] == 0
iterator = iter(CachedLoader(dataset, 16, shuffle="block"))
next(iterator)
os.fork = os.register_at_fork and __import__("posix").fork  # with threads, as a user's program would
pid = os.fork()
if not pid:
    labels = [labels.tolist() for _, labels in CachedLoader(dataset, 16, shuffle="block")]
    os._exit(0 if labels == [labels.tolist() for _, labels in CachedLoader(own, 16, shuffle="block")] else 1)
assert os.waitpid(pid, 0)[1] == 0
print("right")
"""


@pytest.mark.slow
def test_a_forked_process_fetches_by_itself(
    server: Server, cache: Path, tmp_path: Path, run_forking: Callable[..., str]
) -> None:
    assert run_forking(FORKED, server.url, tmp_path / "kept", cache) == "right\n"


KILLED = """
import os, signal, sys
from tpucache import CachedDataset
from tpucache.store.remote import local
local.PIECE_BYTES = 5 << 10
write, count = local.LocalCopy.write, 0
def dying(self, number, piece, data):
    global count
    count += 1
    if count == 4:
        os.pwrite(self.file(piece.shard).number, data[: len(data) // 2], piece.start)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, number, piece, data)
local.LocalCopy.write = dying
dataset = CachedDataset(sys.argv[1], cache_dir=sys.argv[2], in_memory=False)
for image in dataset:
    pass
"""


@pytest.mark.slow
def test_what_a_killed_process_had_fetched_is_used_and_the_rest_is_fetched(
    opened: Opened, server: Server, cache: Path, tmp_path: Path, run_with_torch: Callable[..., Any]
) -> None:
    assert run_with_torch(KILLED, server.url, tmp_path / "kept").returncode == -9
    assert batches(opened()) == batches(CachedDataset(cache))


def test_what_is_kept_is_listed_and_removed_unless_it_is_in_use(
    opened: Opened, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = opened()
    batches(dataset)
    words = ["cached", "--cache-dir", str(tmp_path / "kept"), "--json"]
    assert main(words) == 0
    (kept,) = json.loads(capsys.readouterr().out)["kept"]
    assert (kept["url"], kept["directory"]) == (server.url, str(dataset.directory))
    assert kept["bytes"] > 0
    assert kept["total_bytes"] == dataset.manifest.total_bytes
    assert main([*words, "--clear", server.url]) == 1
    assert "is in use" in capsys.readouterr().err
    dataset._open_reader.cache.reader.close()
    dataset.close()
    del dataset
    gc.collect()
    assert main([*words, "--clear", "https://elsewhere/"]) == 2
    assert main([*words, "--clear", "all"]) == 0
    assert not Path(kept["directory"]).exists()
    assert batches(opened())


def test_how_much_is_kept_is_said_until_all_is(opened: Opened) -> None:
    dataset = opened()
    assert dataset.network is not None
    assert dataset.network.progress == "cached 0.0 of 0.6 MB"
    batches(dataset)
    wait_for(lambda: re.fullmatch(r"cached 0\.[1-5] of 0\.6 MB", dataset.network.progress))
    for variant in (0, 1, 2):
        batches(opened(variant=variant))
    fresh = opened(variant=3)
    batches(fresh)
    assert fresh.network is not None
    wait_for(lambda: fresh.network.kept_bytes == fresh.network.total_bytes)
    assert fresh.network.total_bytes == sum(e.bytes for e in fresh.manifest.shards)
    assert fresh.network.progress == ""


def test_commands_read_a_cache_at_a_url(
    small_pieces: None, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ["--cache-dir", str(tmp_path / "kept")]
    assert main(["inspect", server.url, *kept, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 150
    assert dict(server.requests) == dict.fromkeys(TABLES, 1)
    assert main(["preview", server.url, *kept, "-o", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").stat().st_size > 0
    capsys.readouterr()
    assert main(["bench", server.url, *kept, "--batch-size", "30", "--device-rate", "100000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["network"]["requests"] > 0
    assert 0 <= found["idle"] <= 1
    assert main(["verify", server.url]) == 1
    assert "tpucache fetch URL FOLDER" in capsys.readouterr().err


def test_all_that_an_epoch_reads_is_counted_as_needed(photos: Path, small_pieces: None, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    build_cache(photos, cache, Recipe(size=32, codec="raw"), jobs=1)
    with contextlib.closing(Server(cache)) as server:
        dataset = CachedDataset(server.url, cache_dir=tmp_path / "kept", in_memory=False)
        records = int(dataset.cache.index.read_all()["length"].sum())
        loader = CachedLoader(dataset, 2, shuffle="block")
        for _ in range(3):  # once all is here, nothing is looked up, or counted, any more
            for _ in loader:
                time.sleep(0.01)  # so that all is here long before the epoch ends
            assert dataset.network is not None
            assert dataset.network.needed_bytes == records


def test_a_run_from_a_url_is_that_from_a_local_copy(
    server: Server, cache: Path, tmp_path: Path, short_runs: None
) -> None:
    options = ["--backend", "torch", "--model", "cnn", "--epochs", "1", "--valid", "0.2", "--batch-size", "20"]
    for name, place in (("there", [server.url, "--cache-dir", str(tmp_path / "kept")]), ("here", [str(cache)])):
        assert main(["train", *place, "--run", str(tmp_path / name), *options]) == 0
    losses = [json.loads((tmp_path / name / "report.json").read_text())["losses"] for name in ("there", "here")]
    assert losses[0] == losses[1]
    report = json.loads((tmp_path / "there" / "report.json").read_text())
    assert 0 < report["network"]["needed_bytes"] <= 2 * report["network"]["bytes"]
    assert 0 < report["network"]["kept_bytes"] <= report["network"]["total_bytes"]
    assert json.loads((tmp_path / "here" / "report.json").read_text())["network"] == {}
    described = json.loads((tmp_path / "there" / "run.json").read_text())
    assert described["validation"]["cache"] == server.url
    assert main(["report", str(tmp_path / "there"), "-o", str(tmp_path / "run.html")]) == 0


FILLED = """
import json, logging, os, sys
from tpucache import CachedDataset, CachedLoader
from tpucache.store.remote import local
local.PIECE_BYTES = 5 << 10
logging.basicConfig()
url, folder, filled = sys.argv[1:]
dataset = CachedDataset(url, cache_dir=folder, cache_bytes=1 << 30, in_memory=False)
if filled != "first":
    dataset[0]
if filled:  # by somebody else, to the last byte
    with open(folder + "/other", "wb", 0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
loader = CachedLoader(dataset, 16, shuffle="block", window=32)
print(json.dumps([[[int(images.sum()), *labels.tolist()] for images, labels in loader] for _ in range(2)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("filled", [*thorough("", "later"), "first"])
def test_a_disk_that_is_full_kills_nobody(
    server: Server, cache: Path, disk: SmallDisk, filled: str, run_with_torch: Callable[..., Any]
) -> None:
    disk.mount("size=100k")
    done = run_with_torch(FILLED, server.url, disk.path / "kept", filled)
    assert done.returncode == 0, done.stderr
    loader = CachedLoader(CachedDataset(cache), 16, shuffle="block", window=32)
    expected = [[[int(images.sum()), *labels.tolist()] for images, labels in loader] for _ in range(2)]
    assert json.loads(done.stdout) == expected
    assert done.stderr.count("No space left") == 1


def test_a_server_that_never_answers_is_given_up_when_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of seven tries would wait for as long as the server may be silent."""
    monkeypatch.setattr("tpucache.store.remote.cache.SILENCE_SECONDS", 0.1)
    monkeypatch.setattr("tpucache.store.remote.retry._FIRST_PAUSE", 0.001)
    monkeypatch.setattr("tpucache.store.remote.url.PATIENT_SECONDS", 0.25)
    error = pytest.raises(StoreError, match="Check the URL and the network")
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING, "tpucache"), error:
        CachedDataset(f"http://127.0.0.1:{silent.getsockname()[1]}/cache", cache_dir=tmp_path)
    assert sum("trying again" in message for message in caplog.messages) <= 3


# A user's own program, or the command, which says its process's number first.
LOOP = """
import os, pathlib, runpy, signal, sys
place = pathlib.Path(sys.argv[1])
place.with_suffix(".new").write_text(str(os.getpid()))
place.with_suffix(".new").rename(place)
if sys.argv[4] == "command":
    sys.argv = ["tpucache", "bench", sys.argv[2], "--cache-dir", sys.argv[3], "--batch-size", "4"]
    runpy.run_module("tpucache", run_name="__main__", alter_sys=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
from tpucache import CachedDataset, CachedLoader
from tpucache.loading.ahead import Ahead
loader = CachedLoader(CachedDataset(sys.argv[2], cache_dir=sys.argv[3]), 4)
if sys.argv[4] == "ahead":
    with Ahead(loader, lambda batch, number: batch) as batches:
        list(batches)
for _ in loader:
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", "ahead", "command"])
def test_an_interrupt_while_a_server_stands_still_ends_the_program(
    cache: Path, tmp_path: Path, run_with_torch: Callable[..., Any], kind: str
) -> None:
    released, only_one, began = threading.Event(), threading.Lock(), list[float]()

    def stand_still(name: str, _: int) -> str | None:
        if name.endswith(".lmdb") and only_one.acquire(blocking=False):
            released.wait(0.5)  # until the loop waits for its threads, and these for records
            while not released.is_set():
                began.append(time.monotonic())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int((tmp_path / "process").read_text()), signal.SIGINT)
                released.wait(15)  # then a second one, as the first may have fallen into a finalizer
        elif name.endswith(".lmdb"):
            released.wait(PATIENCE)
        return None

    with contextlib.closing(Server(cache)) as server:
        server.fault = stand_still
        try:
            done = run_with_torch(LOOP, tmp_path / "process", server.url, tmp_path / "kept", kind, finalise=True)
        finally:
            released.set()
    if kind == "command":
        assert done.returncode == 3  # a server's silence would end it with another status, after a minute
        assert "interrupted" in done.stderr
    else:
        assert "KeyboardInterrupt" in done.stderr
        assert time.monotonic() - began[0] < 10
