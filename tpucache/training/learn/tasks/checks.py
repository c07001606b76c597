"""Checks of labels, outputs and class weights that tasks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tpucache.errors import UsageError

Array = npt.NDArray[Any]


def check_shape(outputs: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise UsageError unless a model's outputs have the targets' shape."""
    if tuple(outputs.shape) != tuple(shape):
        raise UsageError(
            f"the model gives {tuple(outputs.shape)}, the labels ask for {tuple(shape)}: use another model"
        )


def check_outputs(outputs: object, shape: Sequence[int], source: str, *, of_pixels: bool = False) -> None:
    """Raise UsageError unless `source` gave floating-point outputs that begin with `shape`: (samples, outputs).

    Outputs of pixels have a height and a width, too.
    """
    samples, numbers = shape
    wanted = f"{numbers} numbers a {'pixel' if of_pixels else 'sample'}"
    if not isinstance(outputs, torch.Tensor):
        given = f"a {type(outputs).__name__}"
    elif not outputs.is_floating_point():
        given = f"{outputs.dtype} {tuple(outputs.shape)}"
    elif tuple(outputs.shape[:2]) != (samples, numbers) or outputs.dim() != (4 if of_pixels else 2):
        given = f"{tuple(outputs.shape)}"
    else:
        return
    raise UsageError(
        f"{source} gives {given} for {samples} samples, the labels ask for {wanted}, as a floating-point tensor: "
        "use a model with so many outputs"
    )


def check_numbers(numbers: Array, classes: int, hint: str = "") -> None:
    """Raise UsageError, with a hint, unless all numbers are those of classes."""
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < classes):
        raise UsageError(
            f"labels reach from {numbers.min()} to {numbers.max()}, and there are {classes} classes, numbered from 0"
            + hint
        )


def check_matrix(name: str, labels: Array, outputs: int) -> None:
    """Raise UsageError unless labels are finite (n, outputs)."""
    if labels.ndim != 2 or labels.shape[1] != outputs:
        raise unfit(name, f"{outputs} numbers a sample", labels)
    bad = np.flatnonzero(~np.isfinite(labels).all(1))
    if len(bad):
        raise UsageError(
            f"the labels of {len(bad)} samples are not finite, the first at position {bad[0]}: leave them out"
        )


def check_without_masks(name: str, mask_classes: int | None) -> None:
    """Raise UsageError when a number of classes of masks was given for a task that has none."""
    if mask_classes is not None:
        raise UsageError(f"the task {name!r} has no masks to give a number of classes for: leave --mask-classes out")


def unfit(name: str, wanted: str, labels: Array) -> UsageError:
    """Return the error for labels of another kind than a task's."""
    return UsageError(
        f"the task {name!r} needs {wanted}, and labels are {labels.dtype} {labels.shape}: use another task"
    )


def class_weights(wanted: str | Sequence[float] | None, outputs: int, counts: Array, over: Any) -> torch.Tensor | None:
    """Return a weight an output, float32 (outputs,): over / counts when "balanced", or the list. Raises UsageError."""
    if wanted is None:
        return None
    if isinstance(wanted, str):
        if wanted != "balanced":
            raise UsageError(f"class weights are balanced or a list of numbers, not {wanted!r}")
        # A class without samples keeps the weight 1.
        return torch.from_numpy(np.where(counts > 0, over / np.maximum(counts, 1), 1.0).astype(np.float32))
    weights = torch.tensor(list(wanted), dtype=torch.float32)
    if len(weights) != outputs or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise UsageError(f"class weights are {outputs} numbers of at least 0, not {list(wanted)}")
    return weights
