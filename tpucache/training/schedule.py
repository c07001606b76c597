"""Learning rate and momentum as functions of the step."""

from __future__ import annotations

import math
from typing import NamedTuple


class Rates(NamedTuple):
    """What the optimizer uses in one step."""

    lr: float
    momentum: float


def one_cycle(
    step: int,
    steps: int,
    peak_lr: float,
    *,
    warmup: float = 0.3,
    start_divisor: float = 25.0,
    end_divisor: float = 1e4,
    momentum: tuple[float, float] = (0.85, 0.95),
) -> Rates:
    """Return the rates of step 0 to `steps` - 1 of one cycle, by cosine (Smith and Topin, arXiv:1708.07120).

    The rate rises from peak / `start_divisor` to the peak over the first `warmup` of the steps, and falls to the
    start / `end_divisor` over the rest; momentum goes the other way. The same as torch's OneCycleLR with two phases.
    """
    low, high = momentum
    start = peak_lr / start_divisor
    turn = max(1e-9, warmup * steps - 1)
    if step <= turn:
        share = step / turn
        return Rates(_cosine(start, peak_lr, share), _cosine(high, low, share))
    share = min(1.0, (step - turn) / max(1e-9, steps - 1 - turn))
    return Rates(_cosine(peak_lr, start / end_divisor, share), _cosine(low, high, share))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
