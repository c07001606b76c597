"""Calls models, losses, steps and metrics that users write; their errors are reported with function, file and line."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

import tpucache
from tpucache.errors import TpucacheError, TrainingError, UsageError
from tpucache.plugins import load_callable

#: Folders with code that is not the user's.
_LIBRARIES: Final = tuple(f"{folder}/" for package in (torch, tpucache) for folder in package.__path__)


@contextlib.contextmanager
def user_code(name: str, inputs: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except TpucacheError:
        raise
    except Exception as error:  # a user's code raises any error
        raise TrainingError(
            f"{name} raised {describe_error(error)}, for a batch of {describe_batch(inputs)}. "
            "Type `tpucache --traceback train …` to see where"
        ) from error


def describe_error(error: BaseException) -> str:
    """Return an error's type and message, and the innermost place in the user's code where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    place = (own or frames)[-1:]
    where = f" in {place[0].name} ({place[0].filename}:{place[0].lineno})" if place else ""
    return f"{type(error).__name__}{where}: {error}"


def describe_batch(inputs: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for name, tensor in inputs.items()
    )


def short_name(metric: str) -> str:
    return metric.replace(":", ".").rpartition(".")[2]


def load_metrics(names: Sequence[str], taken: Sequence[str]) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for name in names:
        short = short_name(name)
        if short in (*taken, *found):
            raise UsageError(f"--metric {name}: there is a metric {short} already. Give the function another name")
        found[short] = load_callable(name)
    return found


def compute_metrics(metrics: Mapping[str, Callable[..., Any]], predictions: Any, labels: Any) -> dict[str, float]:
    """Return the values of the user's metrics, given copies of the predictions and labels of all samples."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        with user_code(f"the metric {name!r}", {"predictions": predictions, "labels": labels}):
            value = _call_metric(metric, predictions, labels)
        array = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        if array.size != 1 or array.dtype.kind not in "fiub":
            raise UsageError(
                f"the metric {name!r} returns {value!r:.80}, but a metric is one number: let it return a float"
            )
        found[name] = float(array.reshape(()))
    return found


def _call_metric(metric: Callable[..., Any], predictions: Any, labels: Any) -> Any:
    try:
        return metric(predictions.copy(), labels.copy())
    except (TypeError, AttributeError) as error:
        try:
            return metric(torch.from_numpy(predictions.copy()), torch.from_numpy(labels.copy()))
        except Exception:  # noqa: BLE001  # it does not take tensors either: report the error for arrays
            raise error from None


def check_loss(loss: object, name: str, *, learns: bool = True) -> torch.Tensor:
    wanted = "a loss is one floating-point number for each batch, such as the mean over its samples"
    if not isinstance(loss, torch.Tensor):
        raise UsageError(f"{name} returns a {type(loss).__name__}, and {wanted}, as a tensor")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise UsageError(f"{name} returns {loss.dtype} {tuple(loss.shape)}, and {wanted}")
    if learns and not loss.requires_grad:
        raise UsageError(f"{name} returns a loss without a gradient: compute it from the model's outputs, not detached")
    return loss.reshape(()).float()
