"""Learning rate and momentum as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, get_args

from tpucache.errors import UsageError
from tpucache.training.settings import ScheduleName

SCHEDULES: Final = get_args(ScheduleName)

_MOMENTUM: Final = 0.9

# XLA turns 0 and 1 into constants, and merges equal numbers into one input. A rate that equals another number of its
# step (1, or one of label smoothing) would make another graph. So all rates are two units of float32 lower.
_NUDGE: Final = 1 - 2.0**-22


class Rates(NamedTuple):
    """The rates of the optimizer in one step; `momentum` is AdamW's first beta."""

    lr: float
    momentum: float


def make_schedule(name: str, steps: int, lr: float) -> Callable[[int], Rates]:
    """Return the schedule with this name: a function that returns the rates of a step, 0 to `steps` - 1.

    `lr` is the highest rate: in one-cycle it is reached after 0.3 of the steps, in warmup-cosine after 0.05. Raises
    UsageError for an unknown name and impossible values.
    """
    if name not in SCHEDULES:
        raise UsageError(f"there is no schedule {name!r}: use {', '.join(SCHEDULES)}")
    if steps < 1 or not 0 < lr < math.inf:
        raise UsageError(
            f"a schedule needs at least one step and a finite rate above 0, not {steps} steps and rate {lr}"
        )
    found = {"one-cycle": one_cycle, "warmup-cosine": warmup_cosine}.get(name)
    return lambda step: constant(lr) if found is None else found(step, steps, lr)


def one_cycle(
    step: int,
    steps: int,
    peak_lr: float,
    *,
    ramp: float = 0.3,
    start_divisor: float = 25.0,
    end_divisor: float = 1e4,
    momentum: tuple[float, float] = (0.85, 0.95),
) -> Rates:
    """Return the rates of step `step`, 0 to `steps` - 1, of one cycle by cosine (Smith and Topin, arXiv:1708.07120).

    This equals torch's OneCycleLR with two phases.
    """
    low, high = momentum
    start = peak_lr / start_divisor
    turn = max(1e-9, ramp * steps - 1)
    if step <= turn:
        share = step / turn
        return _rates(_cosine(start, peak_lr, share), _cosine(high, low, share))
    share = min(1.0, (step - turn) / max(1e-9, steps - 1 - turn))
    return _rates(_cosine(peak_lr, start / end_divisor, share), _cosine(low, high, share))


def warmup_cosine(
    step: int,
    steps: int,
    peak_lr: float,
    *,
    ramp: float = 0.05,
    end_divisor: float = 1e4,
) -> Rates:
    """Return the rates of a linear rise to `peak_lr`, then half a cosine down to `peak_lr` / `end_divisor`."""
    rise = round(ramp * steps)
    if step < rise:
        return _rates(peak_lr * (step + 1) / (rise + 1), _MOMENTUM)
    share = min(1.0, (step - rise) / max(1, steps - 1 - rise))
    return _rates(_cosine(peak_lr, peak_lr / end_divisor, share), _MOMENTUM)


def constant(lr: float) -> Rates:
    return _rates(lr, _MOMENTUM)


def _rates(lr: float, momentum: float) -> Rates:
    return Rates(lr * _NUDGE, momentum * _NUDGE)


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
