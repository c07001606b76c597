"""The history of a run: the loss of each step, and a row for each epoch."""

from __future__ import annotations

import csv
import io
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from tpucache.errors import TrainingError
from tpucache.runs import HISTORY_NAME
from tpucache.store.files import write_atomically

if TYPE_CHECKING:
    import torch

# A loss is read this many steps later, when it has been computed, so that reading does not block.
_LAG: Final = 16

Row = dict[str, Any]


class Watcher(Protocol):
    """An object that a run notifies of losses and epochs."""

    def losses(self, first: int, values: Sequence[float]) -> None:
        """Take the losses of consecutive steps. `first` is the number of the first of these steps, counted from 0."""
        ...

    def epoch(self, row: Row) -> None:
        """Take an epoch's row of the history, with `images_per_second`, `waited` and `device_idle` of the run so far.

        `Pace` describes these three numbers.
        """
        ...


class Losses:
    """The loss of every step, read from the device some steps after it was computed."""

    def __init__(
        self,
        values: list[float],
        watchers: Sequence[Watcher] = (),
        mean: Callable[[Sequence[float]], Sequence[float]] = lambda values: values,
        advice: str = "Try a lower --lr",
        fetch: Callable[[torch.Tensor], Callable[[], torch.Tensor]] = lambda loss: loss.cpu,
    ) -> None:
        """Continue the losses of a run, which are in `values`.

        New losses, averaged over all processes by `mean`, are appended to `values`, and `watchers` are notified.
        `advice` ends the message for a loss that is not finite. `fetch` begins to copy a loss to the host, and returns
        the function that waits for the copy.
        """
        self.values = values
        self._mean = mean
        self._watchers = watchers
        self._advice = advice
        self._fetch = fetch
        self._pending: deque[Callable[[], torch.Tensor]] = deque()

    def append(self, loss: torch.Tensor) -> None:
        """Take a step's loss, which is on the device. Raises TrainingError when an earlier loss is not finite."""
        self._pending.append(self._fetch(loss))
        if len(self._pending) > 2 * _LAG:
            self.settle(_LAG)

    def settle(self, keep: int = 0) -> None:
        """Read all losses but the newest `keep`. Raises TrainingError when a loss is not finite."""
        first = len(self.values)
        read = [float(self._pending.popleft()()) for _ in range(len(self._pending) - keep)]
        for value in self._mean(read):
            if not math.isfinite(value):
                raise TrainingError(f"the loss is {value} in step {len(self.values) + 1:,}. {self._advice}")
            self.values.append(value)
        if len(self.values) > first:
            for watcher in self._watchers:
                watcher.losses(first, self.values[first:])


def write_history(run: Path, rows: Sequence[Row]) -> None:
    """Write `history.csv`, a row for each epoch, atomically, unless it has these rows already.

    Raises TrainingError when it cannot be written.
    """
    text = io.StringIO(newline="")
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path, data = run / HISTORY_NAME, text.getvalue().encode()
    try:
        if not path.exists() or path.read_bytes() != data:
            write_atomically(path, data)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error}") from error
