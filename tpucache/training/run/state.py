"""The state of a run: its steps, the loss of each step, a row for each epoch, and the steps that remain."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from tpucache.errors import TrainingError
from tpucache.training.settings import TrainSettings

if TYPE_CHECKING:
    import torch

# A loss is read this many steps later, when it has been computed, so that reading does not block.
_LAG: Final = 16

Row = dict[str, Any]

#: The columns of metrics in a row begin with it.
VALID: Final = "valid_"


def metric_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of the validation metrics in rows of the history."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    return [name for name in names if name.startswith(VALID) and name != f"{VALID}samples"]


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
        """Continue the losses of a run, which are in `values`."""
        self.values = values
        self._mean = mean
        self._watchers = watchers
        self._advice = advice
        self._fetch = fetch
        self._pending: deque[Callable[[], torch.Tensor]] = deque()

    def append(self, loss: torch.Tensor) -> None:
        self._pending.append(self._fetch(loss))
        if len(self._pending) > 2 * _LAG:
            self.settle(_LAG)

    def settle(self, keep: int = 0) -> None:
        first = len(self.values)
        read = [float(self._pending.popleft()()) for _ in range(len(self._pending) - keep)]
        for value in self._mean(read):
            if not math.isfinite(value):
                raise TrainingError(f"the loss is {value} in step {len(self.values) + 1:,}. {self._advice}")
            self.values.append(value)
        if len(self.values) > first:
            for watcher in self._watchers:
                watcher.losses(first, self.values[first:])


@dataclass
class RunState:
    """What a run has done so far: the number of steps, the loss of each step, and a row for each evaluated epoch.

    `best` is the best value of the watched metric, in a form in which higher is better; it is None without evaluations
    and before the first value that is a number. `best_epoch` is the epoch, from 1, whose weights were kept last; 0 if
    unknown.
    """

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    best: float | None = None
    best_epoch: int = 0

    def keep_best(self, value: float | None) -> bool:
        """Take the watched metric's value in the last row; return whether that epoch's weights are the best so far.

        Until the metric has been a number, and if `value` is None, the newest weights are the best. After that, NaN is
        never the best value.
        """
        is_best = value is None or self.best is None or value > self.best
        if is_best and value is not None and not math.isnan(value):
            self.best = value
        if is_best:
            self.best_epoch = len(self.rows)
        return is_best


@dataclass(frozen=True)
class StepPlan:
    """The steps of a whole run: `epochs` epochs of `per_epoch` steps each.

    The run ends sooner after `patience` epochs in which the watched metric was not better.
    """

    epochs: int
    per_epoch: int
    patience: int | None = None

    @property
    def steps(self) -> int:
        return self.epochs * self.per_epoch

    def awaits_evaluation(self, state: RunState) -> bool:
        evaluated = state.rows[-1]["step"] if state.rows else 0
        return state.steps % self.per_epoch == 0 and evaluated < state.steps

    def is_finished(self, state: RunState) -> bool:
        is_over = state.steps >= self.steps or self.has_stopped_early(state)
        return is_over and not self.awaits_evaluation(state)

    def has_stopped_early(self, state: RunState) -> bool:
        return (
            self.patience is not None
            and state.best is not None
            and state.steps < self.steps
            and len(state.rows) - state.best_epoch >= self.patience
        )

    def epoch_row(self, state: RunState, lr: float, metrics: Mapping[str, float]) -> Row:
        return {
            "epoch": state.steps // self.per_epoch,
            "step": state.steps,
            "lr": lr,
            "train_loss": sum(state.losses[-self.per_epoch :]) / self.per_epoch,
            **{f"{VALID}{name}": value for name, value in metrics.items()},
        }

    def describe(self, state: RunState) -> str:
        return f"after step {state.steps:,} of {self.steps:,}"

    def progress(self, state: RunState) -> str:
        loss = f", loss {state.losses[-1]:.3f}" if state.losses else ""
        return f"epoch {-(-state.steps // self.per_epoch)} of {self.epochs}{loss}"


def make_plan(settings: TrainSettings, samples: int) -> StepPlan:
    return StepPlan(settings.passes, settings.steps_per_epoch(samples), settings.patience)
