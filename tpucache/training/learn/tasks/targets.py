"""Labels become the numbers that a loss compares with outputs."""

from __future__ import annotations

import torch

from tpucache.errors import UsageError


def one_hot(numbers: torch.Tensor, classes: int) -> torch.Tensor:
    """Return float32 (batch, classes, …): 1 at the number, nothing for a number that is no class."""
    places = torch.arange(classes, device=numbers.device).view(1, -1, *[1] * (numbers.dim() - 1))
    return (numbers[:, None] == places).float()


def smooth(targets: torch.Tensor, smoothing: float, towards: float | torch.Tensor) -> torch.Tensor:
    """Return targets moved by the share `smoothing` to `towards`. Raises UsageError unless it is within [0, 1)."""
    if not 0 <= smoothing < 1:
        raise UsageError(f"label smoothing is at least 0 and below 1, not {smoothing}")
    return targets * (1 - smoothing) + smoothing * towards if smoothing else targets
