"""Batches prepared ahead of the loop that takes them, by one thread."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from tpucache import signals
from tpucache.errors import UsageError
from tpucache.loading.loader import BatchLoader, Uncounted
from tpucache.loading.threads import refuse_fork

Prepared = TypeVar("Prepared")
Self = TypeVar("Self", bound="Ahead[Any]")

_DONE: Final = object()


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class Ahead(Generic[Prepared]):
    """Iterates batches that a thread has prepared by `prepare(batch, number)`, `depth` of them ahead of the loop.

    A CachedLoader's batches are counted in its state when they are handed out here, not when they are read. An error in
    reading or preparing a batch is raised in the loop, where that batch would have come. No thread remains when the
    context is left early; in a process that was forked meanwhile, UsageError is raised. `waited_seconds` is how long
    the loop has been blocked here, `cpu_seconds` how long a processor has worked for the thread.
    """

    def __init__(
        self, batches: Iterable[Any], prepare: Callable[[Any, int], Prepared], depth: int = 2, first: int = 0
    ) -> None:
        """Take batches, whose numbers begin at `first`; iterating them, in a thread, begins with the context."""
        self.waited_seconds = 0.0
        self.cpu_seconds = 0.0
        self._batches, self._prepare, self._first = batches, prepare, first
        self._iterator: Iterator[Any] = iter(())  # that of the batches, once the context has begun
        self._ready: queue.Queue[Any] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tpucache-feed", daemon=True)

    @property
    def has_begun(self) -> bool:
        """Whether the context has begun, and with it the thread."""
        return self._thread.ident is not None

    def __enter__(self: Self) -> Self:
        self._process, self._iterator = os.getpid(), self._begin()
        self._thread.start()
        # Also when the interpreter ends: it would stop the thread inside of compiled code, which aborts the process.
        self._end = weakref.finalize(self, _end, self._stop, self._ready, self._thread)
        return self

    def _begin(self) -> Iterator[Any]:
        """Begin to iterate the batches."""
        batches = self._batches
        return batches.iterate_ahead() if isinstance(batches, BatchLoader) else iter(batches)

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError(
            f"a {type(self).__name__} has a thread, which no other process can have: give the loader to that process, "
            f"and make a {type(self).__name__} of it there"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __iter__(self) -> Iterator[Prepared]:
        while True:
            refuse_fork(self._process)
            asked = time.perf_counter()
            item = signals.wait_for(self._ready.get)
            self.waited_seconds += time.perf_counter() - asked
            if item is _DONE:
                return
            if isinstance(item, _Failure):
                raise item.error
            prepared, confirm = item
            if confirm is not None:
                confirm()
            yield prepared

    def _run(self) -> None:
        batches = self._iterator
        try:
            for number, item in enumerate(batches, self._first):
                if self._stop.is_set():
                    return
                batch, confirm = item if isinstance(item, Uncounted) else (item, None)
                self._ready.put((self._prepare(batch, number), confirm))
                self.cpu_seconds = time.thread_time()
                del batch, item  # otherwise the buffer would be in use until the next batch is read
            self._ready.put(_DONE)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the loop raises it again
            self._ready.put(_Failure(error))
        finally:
            # Close a generator in the thread that ran it, before the context ends.
            if isinstance(batches, Generator):
                batches.close()


def _end(stop: threading.Event, ready: queue.Queue[Any], thread: threading.Thread) -> None:
    """Wait until a thread has seen that it must stop; make room meanwhile, as a full queue may block it."""
    stop.set()
    while thread.is_alive():
        try:
            ready.get(timeout=0.05)
        except queue.Empty:
            continue
