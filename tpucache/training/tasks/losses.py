"""Losses by name: one value for each sample or pixel, given a model's outputs and float targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch.nn import functional

#: A function of outputs and targets (batch, outputs, …). It returns float32 (batch,), or (batch, height, width).
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_SMOOTH: Final = 1.0  # pixels, so that Dice is 1 for a class that is neither in a mask nor predicted

#: Losses of masks that are means over samples; other losses of masks are means over the pixels that have a class.
OF_SAMPLES: Final = ("dice", "dice-cross-entropy")


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.float(), targets, reduction="none")


def focal(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy times (1 - p)^2, where p is the class's predicted probability (arXiv:1708.02002)."""
    log = outputs.float().log_softmax(1)
    return (-targets * (1 - log.exp()).square() * log).sum(1)


def binary_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(outputs.float(), targets, reduction="none").mean(1)


def binary_focal(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each sample's binary focal loss, the mean over its classes, as torchvision computes it without alpha."""
    outputs = outputs.float()
    each = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return (each * (outputs.sigmoid() - targets).square()).mean(1)


def dice(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each sample's Dice loss: the mean over classes of 1 - Dice (Milletari et al., arXiv:1606.04797)."""
    has_class = targets.sum(1, keepdim=True)
    predicted, truth = (outputs.float().softmax(1) * has_class).flatten(2), targets.flatten(2)
    common, total = (predicted * truth).sum(2), (predicted + truth).sum(2)
    return (1 - (2 * common + _SMOOTH) / (total + _SMOOTH)).mean(1)


def dice_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each sample's `dice` plus its mean cross-entropy over pixels (Isensee et al., arXiv:1809.10486)."""
    pixels = cross_entropy(outputs, targets).sum((1, 2)) / targets.sum((1, 2, 3)).clamp(min=1)
    return dice(outputs, targets) + pixels


def error(compute: Callable[..., torch.Tensor]) -> Loss:
    """Return a loss for regression: `compute`, such as torch's `mse_loss`, averaged over the columns of a sample."""
    return lambda outputs, targets: compute(outputs.float(), targets, reduction="none").mean(1)
