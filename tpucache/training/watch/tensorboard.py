"""Shows runs in TensorBoard, which is imported only if it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tpucache.errors import DependencyError
from tpucache.training.run.state import Row

_NOT_METRICS: Final = ("epoch", "step")


class TensorBoard:
    """Writes scalars for TensorBoard: `train/loss` for each step, and the numbers of each epoch.

    The tags of an epoch's metrics begin with `valid/`, those of its other numbers with `epoch/`.
    """

    def __init__(self, folder: str | Path) -> None:
        """Take the folder to write to, in which nothing is written yet. Raises DependencyError without TensorBoard."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise DependencyError(
                f"TensorBoard cannot be imported: {error}. Run `pip install tensorboard`, or leave --tensorboard out"
            ) from error
        self._make: Any = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def losses(self, first: int, values: Sequence[float]) -> None:
        """Write the losses of the steps after step `first`."""
        self._write(first, [(step, {"train/loss": value}) for step, value in enumerate(values, first + 1)])

    def epoch(self, row: Row) -> None:
        """Write a row of the history."""
        tagged = {
            name.replace("valid_", "valid/", 1) if name.startswith("valid_") else f"epoch/{name}": value
            for name, value in row.items()
            if name not in _NOT_METRICS
        }
        self._write(row["step"], [(row["step"], tagged)])
        self._writer.flush()

    def _write(self, steps: int, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        # The first call discards scalars of steps after `steps`, which a killed run may have written.
        self._writer = self._writer or self._make(str(self._folder), purge_step=steps + 1)
        for step, scalars in rows:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag, value, step)
