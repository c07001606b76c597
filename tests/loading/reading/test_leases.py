"""Shards in folders that can be written are mapped under read leases, until somebody wants to change them."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from opened import leases_held, maps_of, open_files
from patience import PATIENCE

from tpucache import CachedDataset, CachedLoader, DamageError, Recipe, build_cache, stage_cache
from tpucache import machine as system_module
from tpucache.loading.reading import maps as leases
from tpucache.loading.reading import record_reader as reader_module
from tpucache.loading.reading.maps import TEXTS, ShardMaps
from tpucache.warmup import TableOptions, relabel_cache, repair_cache

sys.path.append(str(Path(__file__).parents[3]))  # the scripts are no part of the package

from scripts.checks.leases import CHANGES

pytestmark = pytest.mark.skipif(not leases.has_leases(), reason="this system gives no read leases")

VICTIM = "v00-00001.lmdb"


@pytest.fixture
def expected(cache: Path) -> torch.Tensor:
    """All images of the cache, in their order."""
    with CachedDataset(cache, in_memory=True) as dataset:
        return torch.stack([image for image, _ in dataset])


def images_of(dataset: CachedDataset, **options: Any) -> torch.Tensor:
    return torch.cat([images.clone() for images, _ in CachedLoader(dataset, 40, **options)])


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tpucache-leases"]


def changing(shard: Path, change: str, whole: Path) -> subprocess.Popen[bytes]:
    """Start another program that changes a shard."""
    places = {"shard": str(shard), "whole": str(whole), "aside": str(shard.with_name("aside"))}
    return subprocess.Popen(["sh", "-c", CHANGES[change]], env={**os.environ, **places})


def wait_for(program: subprocess.Popen[bytes]) -> None:
    assert program.wait(timeout=PATIENCE) == 0


@pytest.mark.parametrize("in_memory", ["auto", False])
@pytest.mark.parametrize("variant", [0, "epoch"])
def test_a_loader_reads_out_of_leased_maps_alone(cache: Path, variant: int | str, in_memory: Any) -> None:
    with CachedDataset(cache, variant, in_memory=in_memory) as dataset:
        assert dataset.reading == ("map", 0)
        loader = CachedLoader(dataset, 40)
        for _ in range(3):
            list(loader)
        shards = sum((entry.variant > 0) == (variant == "epoch") for entry in dataset.manifest.shards)
        assert loader.metrics()["maps"] == dataset.maps == {"lease": shards}
        assert loader.metrics()["records"] == {"memory": 0, "map": 3 * len(dataset), "file": 0}
        assert leases_held() >= shards


@pytest.mark.slow
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_by_another_program_waits_for_the_map_to_end_and_what_is_read_then_is_right_or_an_error(
    cache: Path, copy: Path, expected: torch.Tensor, change: str
) -> None:
    dataset = CachedDataset(copy, in_memory=False)
    assert torch.equal(images_of(dataset), expected)
    wait_for(changing(copy / VICTIM, change, cache / VICTIM))
    keeps_the_file = change.startswith("rename") or change == "unlink"
    is_whole = keeps_the_file or change in ("append", "cp", "dd", "grow", "in place")
    maps = {"lease": 3} if keeps_the_file else {"lease": 2, "given_back": 1}
    if is_whole:
        assert torch.equal(images_of(dataset), expected)
    else:
        with pytest.raises(DamageError, match=VICTIM):
            images_of(dataset)
        assert torch.equal(dataset[0][0], expected[0])  # of another shard
    assert dataset.maps == maps


@pytest.mark.slow
def test_a_copy_that_has_begun_ends_before_its_map(
    cache: Path, copy: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = CachedDataset(copy, in_memory=False)
    images_of(dataset)
    has_begun, may_end, stopped = threading.Event(), threading.Event(), threading.Event()
    copy_rows, stop_reading = reader_module.copy_rows, ShardMaps.stop_reading

    def slow_copy(*arguments: Any, **options: Any) -> None:
        has_begun.set()
        assert may_end.wait(PATIENCE)
        copy_rows(*arguments, **options)

    def noted_stop(maps: ShardMaps, shard: int) -> Any:
        uses = stop_reading(maps, shard)
        stopped.set()
        return uses

    monkeypatch.setattr(reader_module, "copy_rows", slow_copy)
    monkeypatch.setattr(ShardMaps, "stop_reading", noted_stop)
    first: list[torch.Tensor] = []

    def read() -> None:
        with contextlib.suppress(DamageError):  # the rest of the epoch is read from a file that is empty by then
            for images, _ in CachedLoader(dataset, 40, threads=1):
                first.append(images.clone())

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(PATIENCE)
    program = changing(copy / VICTIM, "empty", cache / VICTIM)
    assert stopped.wait(PATIENCE)
    for _ in range(3):  # looks of the watching thread
        leases.WATCH.look()
    assert maps_of(copy) == 3  # also the map that is to end
    assert program.poll() is None
    may_end.set()
    thread.join()
    wait_for(program)
    assert maps_of(copy) == 2
    assert torch.equal(first[0], expected[:40])
    assert torch.equal(dataset[0][0], expected[0])


@pytest.mark.slow
def test_no_program_that_handles_signals_hears_of_leases(cache: Path, copy: Path) -> None:
    heard: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: heard.append(number))
        for number in (signal.SIGIO, signal.SIGURG)
    }
    try:
        dataset = CachedDataset(copy, in_memory=False)
        images_of(dataset)
        wait_for(changing(copy / VICTIM, "empty", cache / VICTIM))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert dataset.maps == {"lease": 2, "given_back": 1}
    assert heard == []


def test_nothing_is_left_of_a_dataset_that_is_closed(copy: Path) -> None:
    before = leases_held()
    dataset = CachedDataset(copy, "epoch", in_memory=False)
    images_of(dataset)
    assert leases_held() > before
    dataset.close()
    assert (open_files(copy), maps_of(copy), leases_held()) == ([], 0, before)
    if not leases.WATCH.maps:  # nothing of other tests
        for thread in watching():
            thread.join(PATIENCE)
        assert watching() == []


def test_the_thread_that_watches_begins_again_with_the_next_lease(copy: Path) -> None:
    for _ in range(3):
        with CachedDataset(copy, in_memory=False) as dataset:
            assert dataset[3][0].shape == (3, 16, 16)
            assert len(watching()) == 1
            assert dataset.maps == {"lease": 1}


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EACCES, "other_owner"),
        (errno.EAGAIN, "open_for_writing"),
        (errno.EINVAL, "no_leases"),
        (errno.ENOLCK, "no_leases"),
    ],
)
def test_without_leases_all_is_read_from_files_or_kept(
    copy: Path, expected: torch.Tensor, number: int, reason: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = system_module.fcntl

    def refusing(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE and argument == fcntl.F_RDLCK:
            raise OSError(number, os.strerror(number))
        return int(fcntl.fcntl(descriptor, command, argument))

    monkeypatch.setattr(system_module, "fcntl", SimpleNamespace(**{**vars(fcntl), "fcntl": refusing}))
    dataset = CachedDataset(copy)
    assert dataset.reading == ("keep", expected.numel())
    loader = CachedLoader(dataset, 40)
    for _ in range(2):
        assert torch.equal(torch.cat([images.clone() for images, _ in loader]), expected)
    assert loader.metrics()["records"] == {"memory": len(expected), "map": 0, "file": len(expected)}
    assert dataset.maps == {reason: 3}
    assert reason in TEXTS
    dataset.close()
    assert open_files(copy) == []


def test_a_file_that_is_open_for_writing_is_not_mapped(copy: Path, expected: torch.Tensor) -> None:
    with (copy / VICTIM).open("r+b"):
        dataset = CachedDataset(copy, in_memory=False)
        assert torch.equal(images_of(dataset), expected)
        assert dataset.maps == {"lease": 2, "open_for_writing": 1}


def test_file_systems_that_other_machines_change_are_not_mapped(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "file_system", lambda _: 0x6969)  # NFS
    dataset = CachedDataset(copy)
    assert dataset.reading.way == "keep"
    images_of(dataset)
    assert dataset.maps == {"not_local": 3}


def test_where_the_kernel_waits_for_too_short_a_time_nothing_is_mapped(tmp_path: Path) -> None:
    for seconds in (19, 20):
        path = tmp_path / str(seconds)
        path.write_text(f"{seconds}\n")
        assert leases.has_leases(path) == (seconds == 20)


def test_half_of_the_files_that_may_be_open_are_leased_at_most(
    copy: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, most = CachedDataset(copy, in_memory=False), len(leases.WATCH.maps) + 1
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * most, 2 * most))
    assert torch.equal(images_of(dataset), expected)
    assert dataset.maps == {"lease": 1, "too_many_files": 2}


def test_a_file_that_was_replaced_since_it_was_opened_is_not_mapped(cache: Path, copy: Path) -> None:
    dataset = CachedDataset(copy, in_memory=False)
    reader = dataset.cache.reader
    number = reader.file(0).number
    shutil.copy(cache / reader.shards[0].name, copy / "aside")
    (copy / "aside").replace(reader.path(0))
    assert leases.refusal(reader.path(0), number) == "given_back"
    assert leases.refusal(reader.path(1), reader.file(1).number) is None


@pytest.mark.slow
def test_a_map_is_not_read_where_nobody_has_looked_whether_it_may_be(
    copy: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = CachedDataset(copy, in_memory=False)
    images_of(dataset)
    leases.WATCH.pause()  # as a thread that does not get to run
    try:
        with pytest.raises(BlockingIOError):
            os.open(copy / VICTIM, os.O_WRONLY | os.O_NONBLOCK)
        assert dataset.maps == {"lease": 3}
        monkeypatch.setattr(leases.WATCH, "seen", float("-inf"))
        assert torch.equal(images_of(dataset), expected)
        assert dataset.maps == {"lease": 2, "given_back": 1}
        assert maps_of(copy) == 3
    finally:
        leases.WATCH.resume()
    os.close(os.open(copy / VICTIM, os.O_WRONLY))  # waits until the map has ended
    assert maps_of(copy) == 2


@pytest.mark.slow
def test_our_own_commands_never_wait_for_a_reader(
    cache: Path, copy: Path, photos: Path, tmp_path: Path, expected: torch.Tensor
) -> None:
    with (copy / VICTIM).open("r+b") as file:
        file.truncate(8192)
    damaged = CachedDataset(copy, 1, in_memory=False)
    images_of(damaged)
    repair_cache(photos, copy, jobs=1)
    dataset = CachedDataset(copy, in_memory=False)
    assert torch.equal(images_of(dataset), expected)
    (tmp_path / "labels.csv").write_text("path,label\n" + "".join(f"{path},0\n" for path in dataset.paths))
    relabel_cache(copy, tmp_path / "labels.csv", TableOptions(label_cols=("label",)))
    build_cache(photos, copy, Recipe(size=16, variants=4), jobs=1)
    stage_cache(copy, tmp_path / "staged")
    for each in (damaged, dataset):
        assert set(each.maps) == {"lease"}
        images_of(each)
        assert set(each.maps) == {"lease"}


FORK = """
import os, sys, threading
import numpy as np
from opened import leases_held, maps_of
from pathlib import Path
from tpucache import CachedDataset, CachedLoader

def read(dataset):
    return np.concatenate([np.asarray(images) for images, _ in CachedLoader(dataset, 40)])

folder = Path(sys.argv[1]).resolve()
dataset = CachedDataset(folder, in_memory=False)
expected = read(dataset)
assert (leases_held(), maps_of(folder), dataset.maps) == (3, 3, {"lease": 3}), (leases_held(), dataset.maps)
to_child, to_parent = os.pipe(), os.pipe()
child = os.fork()
if not child:
    assert threading.active_count() == 1
    assert (leases_held(), maps_of(folder), dataset.maps) == (0, 0, {}), (leases_held(), dataset.maps)
    assert np.array_equal(read(dataset), expected)
    assert (leases_held(), maps_of(folder), dataset.maps) == (3, 3, {"lease": 3})
    os.write(to_parent[1], b"1")
    os.read(to_child[0], 1)  # meanwhile the parent ends
    assert np.array_equal(read(dataset), expected)
    assert dataset.maps == {"lease": 3}
    os._exit(0)
os.read(to_parent[0], 1)
assert (leases_held(), maps_of(folder), dataset.maps) == (3, 3, {"lease": 3})
assert np.array_equal(read(dataset), expected)
dataset.close()
assert leases_held() == maps_of(folder) == 0
os.write(to_child[1], b"1")
assert os.waitpid(child, 0)[1] == 0
second = os.fork()
if not second:
    os._exit(0)
assert os.waitpid(second, 0)[1] == 0

dataset = CachedDataset(folder, in_memory=False)
assert np.array_equal(read(dataset), expected)
third = os.fork()
if not third:
    os.close(os.open(folder / "v00-00000.lmdb", os.O_WRONLY))  # waits for the parent's map to end
    dataset.close()
    os._exit(0)
assert os.waitpid(third, 0)[1] == 0
assert dataset.maps == {"lease": 2, "given_back": 1}
assert np.array_equal(read(dataset), expected)
"""


@pytest.mark.slow
def test_a_forked_process_takes_leases_of_its_own_and_leaves_those_of_its_parent(
    copy: Path, run_forking: Callable[..., str]
) -> None:
    run_forking(FORK, copy)


END = """
import sys
from tpucache import CachedDataset, CachedLoader
dataset = CachedDataset(sys.argv[1], in_memory=False)
batches = iter(CachedLoader(dataset, 10))
print(len(next(batches)[0]), dataset.maps)
"""


@pytest.mark.slow
def test_a_program_that_ends_in_the_middle_of_an_epoch_ends_well(
    cache: Path, run_with_torch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_with_torch(END, cache)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "10 {'lease': 3}\n"


def test_records_larger_than_the_memory_are_read_anew_in_each_epoch(
    copy: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases.BUDGET, "available", lambda: 0)
    dataset = CachedDataset(copy, in_memory=False)
    for _ in range(2):
        assert torch.equal(images_of(dataset), expected)
        assert not dataset._reader._maps.is_present(np.arange(len(expected))).any()
    assert dataset.maps == {"lease": 3}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a map behind that another one would count."""
    yield
    for leased in list(leases.WATCH.maps):
        assert leased.owner() is not None
