"""Writes a run's scalars for TensorBoard."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tpucache.errors import DependencyError
from tpucache.training.run.history import Row

_NOT_METRICS: Final = ("epoch", "step")


def tagged(row: Row) -> dict[str, float]:
    """Return an epoch's numbers by their tags: `valid/…` for metrics, `epoch/…` for the rest."""
    return {
        name.replace("valid_", "valid/", 1) if name.startswith("valid_") else f"epoch/{name}": value
        for name, value in row.items()
        if name not in _NOT_METRICS
    }


class TensorBoard:
    """Writes scalars: `train/loss` for each step; for each epoch `valid/…` for metrics and `epoch/…` for the rest."""

    def __init__(self, folder: Path) -> None:
        """Raise DependencyError without TensorBoard. Nothing is written before the first loss."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise DependencyError(
                f"TensorBoard cannot be imported: {error}. `pip install tensorboard`, or leave it out"
            ) from error
        self._make: Any = SummaryWriter
        self._folder = folder
        self._writer: Any = None
        self._has_failed = False

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._forgiving():
            if self._writer is not None:
                self._writer.close()

    def losses(self, first: int, values: Sequence[float]) -> None:
        """Write the losses of the steps from number `first` on; TensorBoard's steps are counted from 1."""
        self._write(first, [(step, {"train/loss": value}) for step, value in enumerate(values, first + 1)])

    def epoch(self, row: Row) -> None:
        """Write an epoch's numbers."""
        self._write(row["step"], [(row["step"], tagged(row))])
        with self._forgiving():
            self._writer.flush()

    def _write(self, steps: int, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Write scalars. The first call discards scalars of later steps, which a killed run may have written."""
        with self._forgiving():
            self._writer = self._writer or self._make(str(self._folder), purge_step=steps + 1)
            for step, scalars in rows:
                for tag, value in scalars.items():
                    self._writer.add_scalar(tag, value, step)

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Warn once of any error of TensorBoard: the run continues."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a full disk among others
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(f"TensorBoard failed, and may not show all of this run: {error}", stacklevel=3)
