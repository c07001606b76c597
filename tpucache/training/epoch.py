"""What follows the last step of an epoch: its evaluation, its row of the history, and its weights if they are best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from tpucache.training.evaluate import evaluate
from tpucache.training.feed.idle import Pace
from tpucache.training.learn.learner import Learner
from tpucache.training.learn.tasks.find import Task
from tpucache.training.run.files import RunData, save_best
from tpucache.training.run.history import Row, Watcher
from tpucache.training.run.state import RunState, StepPlan


def end_epoch(
    run: Path, learner: Learner, data: RunData, plan: StepPlan, state: RunState, check: Callable[[], None]
) -> Row:
    """Evaluate the epoch that has ended, add its row to the state, and save its weights if they are the best.

    `check` is called between the batches of the evaluation; what it raises leaves the state as it was.
    """
    metrics = {} if data.valid_set is None else evaluate(learner, data.valid_set, check)
    row: Row = {
        "epoch": state.steps // plan.per_epoch,
        "step": state.steps,
        "lr": plan.schedule(state.steps - 1).lr,
        "train_loss": sum(state.losses[-plan.per_epoch :]) / plan.per_epoch,
        **{f"valid_{name}": value for name, value in metrics.items()},
    }
    state.rows.append(row)
    if state.keep_best(watched_value(learner.task, metrics)):
        save_best(run, learner, data)
    return row


def notify(watchers: Sequence[Watcher], row: Row, pace: Pace) -> None:
    """Report an epoch to watchers, with the pace, which is no part of the history: a resumed run has the same rows."""
    for watcher in watchers:
        watcher.epoch({**row, "images_per_second": pace.images_per_second, "waited": pace.waited})


def watched_value(task: Task, metrics: dict[str, float]) -> float | None:
    """Return what is to be as high as possible: None where nothing was evaluated, NaN where it has no value."""
    if not metrics:
        return None
    name, more_is_better = task.watched
    value = metrics.get(name, math.nan)
    return value if more_is_better else -value
