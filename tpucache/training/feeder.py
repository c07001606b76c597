"""The upload thread: host batch -> device batch, two ahead, and how long the loop waited for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch

from tpucache.training.device import Device

_DONE: Final = object()


class DeviceBatch(NamedTuple):
    """A batch on the device: images uint8 (batch, height, width, channels), labels (batch,) or (batch, m)."""

    images: torch.Tensor
    labels: torch.Tensor


class _Failure(NamedTuple):
    error: BaseException


class Feeder:
    """Iterates device batches, uploaded by one thread of its own `depth` batches ahead.

    What goes wrong in the batches or the upload is raised in the loop, at its place in the order. Leaving the context
    early leaves no thread behind. `waited_seconds` is how long the loop was blocked here so far.
    """

    def __init__(self, batches: Iterable[Any], device: Device, depth: int = 2) -> None:
        """Take host batches as CachedLoader gives them; the thread starts with the context."""
        self.waited_seconds = 0.0
        self._batches = batches
        self._device = device
        self._ready: queue.Queue[Any] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._upload, name="tpucache-feed", daemon=True)

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        while self._thread.is_alive():
            # The thread may be blocked on a full queue: make room until it has seen the flag.
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()

    def __iter__(self) -> Iterator[DeviceBatch]:
        while True:
            asked = time.perf_counter()
            item = self._ready.get()
            self.waited_seconds += time.perf_counter() - asked
            if item is _DONE:
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item

    def _upload(self) -> None:
        batches = iter(self._batches)
        try:
            for images, labels in batches:
                if self._stop.is_set():
                    return
                # Channels last in memory: this view is contiguous, so nothing is transposed on the host.
                wire = images.permute(0, 2, 3, 1)
                self._ready.put(DeviceBatch(self._device.put(wire), self._device.put(labels)))
                del images, labels, wire  # or the buffer would stay out until the next batch is here
            self._ready.put(_DONE)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the loop raises it again
            self._ready.put(_Failure(error))
        finally:
            # A generator is closed in the thread that ran it, and before the context is left.
            if isinstance(batches, Generator):
                batches.close()
