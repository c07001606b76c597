"""Whatever is opened, read and left leaves no thread, no socket and no file, however often that is done."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import wait_for
from servers import Server

from tpucache import CachedDataset, CachedLoader, MixedLoader
from tpucache.training.device import CpuDevice
from tpucache.training.feed import Feeder

OPENINGS = 30  # five of each use: what one of them leaves is found

#: Uses a dataset, and closes what it has opened upon it only if told to.
Use = Callable[[CachedDataset, bool], None]


def held() -> Counter[str]:
    """Count the threads of this process, its sockets, and its other open files by their names."""
    found = Counter({"threads": len([*Path("/proc/self/task").iterdir()])})
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder itself
            name = str(link.readlink())
            found["sockets" if name.startswith("socket:") else name] += 1
    return found


def own_threads() -> set[threading.Thread]:
    """Return the threads that tpucache has started; those of earlier tests may still be among them."""
    return {each for each in threading.enumerate() if each.name.startswith("tpucache")}


def read_samples(dataset: CachedDataset, _closes: bool) -> None:
    dataset[3], dataset[77]


def read_fields(dataset: CachedDataset, _closes: bool) -> None:
    dataset.select([1, 2, 3])[1]


def abandon_loader(dataset: CachedDataset, closes: bool) -> None:
    loader = CachedLoader(dataset.select(range(32)), 8, threads=2)
    for _ in loader:
        break
    if closes:
        loader.close()


def finish_loader(dataset: CachedDataset, closes: bool) -> None:
    loader = CachedLoader(dataset.select(range(16)), 8, shuffle="block", window=16, threads=1)
    assert sum(len(labels) for _, labels in loader) == 16
    if closes:
        loader.close()


def mix(dataset: CachedDataset, closes: bool) -> None:
    loaders = [CachedLoader(dataset.select(range(at, at + 16)), 8, shuffle=True, threads=1) for at in (0, 16)]
    mixed = MixedLoader(loaders, shares=[1, 1])
    for _ in mixed:
        break
    if closes:
        for loader in loaders:
            loader.close()


def feed(dataset: CachedDataset, closes: bool) -> None:
    loader = CachedLoader(dataset.select(range(32)), 8, threads=1)
    with Feeder(loader, CpuDevice()) as feeder:
        for _ in feeder:
            break
    if closes:
        loader.close()


USES: tuple[Use, ...] = (read_samples, read_fields, abandon_loader, finish_loader, mix, feed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "closes"),
    [
        pytest.param(place, closes, id=f"{place}-{'closed' if closes else 'forgotten'}", marks=marks)
        for place, closes, marks in (
            ("folder", True, ()),
            ("URL", False, ()),
            *(
                (place, closes, pytest.mark.thorough)
                for place, closes in (("folder", False), ("memory", True), ("memory", False), ("URL", True))
            ),
        )
    ],
)
def test_openings_leave_nothing(cache: Path, server: Server, tmp_path: Path, place: str, closes: bool) -> None:
    options: dict[str, Any] = {"in_memory": place == "memory"}
    if place == "URL":
        options["cache_dir"] = tmp_path / "kept"  # a folder would be read as a mounted bucket with it

    def open_once(number: int) -> None:
        dataset = CachedDataset(server.url if place == "URL" else cache, **options)
        USES[number % len(USES)](dataset, closes)
        if closes:
            dataset.close()

    for number in range(len(USES)):  # what is imported, compiled, or kept for the next opening
        open_once(number)
    gc.collect()  # what earlier tests of this process have left
    before, threads = held(), own_threads()
    gc.disable()  # nothing waits for it
    try:
        for number in range(OPENINGS):
            open_once(number)
        # The server's own threads and sockets end a moment later.
        wait_for(lambda: not held() - before and own_threads() <= threads)
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_program_that_closes_nothing_ends_by_itself(server: Server, tmp_path: Path, run_with_torch: Any) -> None:
    program = """
import sys
import threading
from tpucache import CachedDataset, CachedLoader
dataset = CachedDataset(sys.argv[1], cache_dir=sys.argv[2])
batches = iter(CachedLoader(dataset, 8, threads=2))
print(len(next(batches)[1]))
"""
    done = run_with_torch(program, server.url, tmp_path / "kept", finalise=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "8\n", "")
