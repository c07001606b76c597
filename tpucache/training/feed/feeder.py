"""The upload thread: host batch -> device batch, two batches ahead, and how long the loop waited for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tpucache.store.fields import IMAGE, LABEL
from tpucache.training.device import Device
from tpucache.training.device.tensors import DeviceBatch

_DONE: Final = object()

Draw = Callable[[int], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class Feeder:
    """Iterates device batches, uploaded by one thread of its own `depth` batches ahead.

    An error in reading or uploading a batch is raised in the loop, where that batch would have come. No thread remains
    when the context is left early. `waited_seconds` is how long the loop has been blocked here.
    """

    def __init__(
        self, batches: Iterable[Any], device: Device, depth: int = 2, draw: Draw | None = None, first: int = 0
    ) -> None:
        """Take host batches as CachedLoader gives them; the thread starts with the context.

        `draw` makes the random numbers that go up with a batch from its number, the first one's being `first`.
        """
        self.waited_seconds = 0.0
        self._batches = batches
        self._device = device
        self._draw, self._first = draw, first
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
            for number, batch in enumerate(batches, self._first):
                if self._stop.is_set():
                    return
                self._ready.put(self._send(batch, number))
                del batch  # otherwise the buffer would be in use until the next batch is read
            self._ready.put(_DONE)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the loop raises it again
            self._ready.put(_Failure(error))
        finally:
            # Close a generator in the thread that ran it, before the context ends.
            if isinstance(batches, Generator):
                batches.close()

    def _send(self, batch: Any, number: int) -> DeviceBatch:
        named = as_named(batch)
        put = self._device.put
        return DeviceBatch(
            # Channels last in memory: that view is contiguous, so nothing is transposed on the host.
            {
                name: put(array.permute(0, 2, 3, 1) if name == IMAGE and array.ndim == 4 else array)
                for name, array in named.items()
                if name != LABEL
            },
            put(named[LABEL]),
            None if self._draw is None else put(torch.from_numpy(self._draw(number))),
        )


def as_named(batch: Any) -> Mapping[str, torch.Tensor]:
    """Return a loader's batch, (images, labels) or a dict, as a dict of tensors with the labels under "label"."""
    if isinstance(batch, Mapping):
        return batch
    images, labels = batch
    return {IMAGE: images, LABEL: labels}
