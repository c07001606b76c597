"""What the contenders of the streaming benchmark share: epochs from a URL, on the clock. Needs numpy alone.

Three commands. `write` makes the contender's own format out of `records.bin`, for the server to serve. `memory` takes
memory and gives it back: a virtual machine gets what it has not used for a while page by page from its host, which
takes up to twenty times as long as other new memory, whoever happens to come first. `epoch` reads an epoch and answers
with the samples, the seconds, and those to the first batch; the first epoch's begin before anything is opened.
"""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from scripts.bench.peers.protocol import Commands, Role, Setting

BATCH: Final = 256
_MEMORY_BYTES: Final = 3 << 30
MEGABYTES: Final = 64  # of a file that a contender writes

Array = np.ndarray[Any, Any]
#: The number of samples of each batch of an epoch, once all of it is in memory.
Epoch = Iterable[int]


def records(data: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the bytes and the label of each record that `scripts.bench.stream` exported."""
    starts, labels = np.load(data / "starts.npy"), np.load(data / "labels.npy")
    found = np.memmap(data / "records.bin", np.uint8, "r")
    for at, label in enumerate(labels.tolist()):
        yield found[int(starts[at]) : int(starts[at + 1])].tobytes(), label


def streamer(
    open_url: Callable[..., Callable[[], Epoch]],
    write: Callable[[Path, Path], None] = lambda data, folder: None,
) -> Role:
    """Return the role of `open_url(url, folder, **setting)`, which returns what begins an epoch."""

    def start(setting: Setting) -> Commands:
        data, url, folder = (setting.pop(name, "") for name in ("data", "url", "folder"))

        @functools.cache
        def opened() -> Callable[[], Epoch]:
            return open_url(url, Path(folder), **setting)

        def make(_: str) -> dict[str, Any]:
            write(Path(data), Path(folder))
            return {"written": folder}

        def epoch(_: str) -> dict[str, Any]:
            began = time.perf_counter()
            return _take(opened(), began)

        return {
            "write": make,
            "memory": _use_memory,
            "epoch": epoch,
        }

    return start


def _use_memory(_: str) -> dict[str, Any]:
    with mmap.mmap(-1, _MEMORY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    return {"bytes": _MEMORY_BYTES}


def _take(begin: Callable[[], Epoch], began: float) -> dict[str, Any]:
    """Read an epoch."""
    samples, first = 0, None
    for size in begin():
        first = first or time.perf_counter() - began
        samples += size
    return {"images": samples, "seconds": time.perf_counter() - began, "first_seconds": first}
