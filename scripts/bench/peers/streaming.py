"""What the contenders of the streaming benchmark share: epochs from a URL, on the clock. Needs numpy alone.

Four commands. `write` makes the contender's own format out of `records.bin`, for the server to serve. `memory` takes
memory and gives it back: a virtual machine gets what it has not used for a while page by page from its host, which
takes up to twenty times as long as other new memory, whoever happens to come first. `epoch` reads an epoch and answers
with the samples, the seconds, and those to the first batch; the first epoch's begin before anything is opened, and
`loader_seconds` are those until the loader was made. `paced RATE` does the same for a device that takes RATE samples
a second. `waited_seconds` are those in which no batch was there, after the first one.
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

        return {
            "write": make,
            "memory": _use_memory,
            "epoch": lambda _: read(opened, None),
            "paced": lambda rate: read(opened, float(rate)),
        }

    return start


def _use_memory(_: str) -> dict[str, Any]:
    with mmap.mmap(-1, _MEMORY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    return {"bytes": _MEMORY_BYTES}


def read(opened: Callable[[], Callable[[], Epoch]], rate: float | None) -> dict[str, Any]:
    """Read an epoch, for a device that takes `rate` samples a second, None: any number of them."""
    began = asked = time.perf_counter()
    samples, first, waited = 0, None, 0.0
    begin = opened()
    made = time.perf_counter()
    for size in begin():
        now = time.perf_counter()
        if first is None:
            first = now - began
        else:
            waited += now - asked
        samples += size
        if rate:
            # The device is busy until then, however late the batch came.
            time.sleep(max(0.0, now + size / rate - time.perf_counter()))
        asked = time.perf_counter()
    seconds = time.perf_counter() - began
    times = {"seconds": seconds, "loader_seconds": made - began, "first_seconds": first, "waited_seconds": waited}
    return {"images": samples, **times}
