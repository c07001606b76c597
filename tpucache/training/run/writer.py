"""Files are written by a thread, while the next steps run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

_WAITING: Final = 2  # the best weights and the state of one epoch: what is written later waits for their memory


class BackgroundWriter:
    """Runs writes one after another, in their order.

    After an error no other write is begun, and the next call raises it: what is on the disk is what it would be if the
    process had been killed in that write.
    """

    def __init__(self) -> None:
        self._writes: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tpucache-write", daemon=True)

    def __enter__(self) -> BackgroundWriter:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writes.put(None)
        self._thread.join()
        if error is None:
            self._raise()

    def submit(self, write: Callable[[], None]) -> None:
        """Run a write after those before it; what it writes must not change meanwhile."""
        self._raise()
        self._writes.put(write)

    def flush(self) -> None:
        """Wait for all writes."""
        self._writes.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            write = self._writes.get()
            try:
                if write is None:
                    return
                if self._error is None:
                    write()
            except BaseException as error:  # noqa: BLE001  # whatever it is, the loop raises it again
                self._error = error
            finally:
                self._writes.task_done()
