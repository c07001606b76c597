"""The state of a run, and the steps that remain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tpucache.training.run.history import Row
from tpucache.training.settings import TrainSettings


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
        """The number of steps in all epochs together."""
        return self.epochs * self.per_epoch

    def awaits_evaluation(self, state: RunState) -> bool:
        """Return whether the last step ended an epoch that has not been evaluated yet."""
        evaluated = state.rows[-1]["step"] if state.rows else 0
        return state.steps % self.per_epoch == 0 and evaluated < state.steps

    def is_finished(self, state: RunState) -> bool:
        """Return whether all epochs are trained and evaluated, or the run has stopped early."""
        is_over = state.steps >= self.steps or self.has_stopped_early(state)
        return is_over and not self.awaits_evaluation(state)

    def has_stopped_early(self, state: RunState) -> bool:
        """Return whether the run ends because the watched metric has not improved for `patience` epochs."""
        return (
            self.patience is not None
            and state.best is not None
            and state.steps < self.steps
            and len(state.rows) - state.best_epoch >= self.patience
        )

    def epoch_row(self, state: RunState, lr: float, metrics: Mapping[str, float]) -> Row:
        """Return the history's row for the epoch that has just ended; `lr` is the learning rate of its last step."""
        return {
            "epoch": state.steps // self.per_epoch,
            "step": state.steps,
            "lr": lr,
            "train_loss": sum(state.losses[-self.per_epoch :]) / self.per_epoch,
            **{f"valid_{name}": value for name, value in metrics.items()},
        }

    def describe(self, state: RunState) -> str:
        """Return the position in the run, as text for messages."""
        return f"after step {state.steps:,} of {self.steps:,}"

    def progress(self, state: RunState) -> str:
        """Return the epoch and the last known loss, as text for the progress bar."""
        loss = f", loss {state.losses[-1]:.3f}" if state.losses else ""
        return f"epoch {-(-state.steps // self.per_epoch)} of {self.epochs}{loss}"


def make_plan(settings: TrainSettings, samples: int) -> StepPlan:
    """Return the plan of a run with these settings on this number of samples.

    Raises UsageError if the number of epochs or the batch size is not decided yet.
    """
    return StepPlan(settings.passes, settings.steps_per_epoch(samples), settings.patience)
