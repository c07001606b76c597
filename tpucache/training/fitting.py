"""Training from Python: `train` takes a model, a dataset and settings, and returns the best model and a report."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import nn

from tpucache.loading.columns import stratified_split
from tpucache.loading.dataset import CachedDataset
from tpucache.progress import note
from tpucache.runs import BEST_NAME
from tpucache.training.defaults import Custom
from tpucache.training.device import AUTO, DEVICES, Choice, Device, choose_backend, open_device
from tpucache.training.loop import train as run_training
from tpucache.training.optimizers import OptimizerMaker, find_optimizer
from tpucache.training.options import RunOptions
from tpucache.training.run.report import TrainReport
from tpucache.training.run.saved import SavedRun
from tpucache.training.run.state import Row
from tpucache.training.settings import TrainSettings
from tpucache.training.tasks.regression import InLabelUnits, Regression
from tpucache.training.watch import notebook_watchers
from tpucache.training.weights import load_checkpoint

Data = CachedDataset | str | Path


@dataclass(frozen=True)
class TrainResult:
    """The result of training.

    `model` is the model with its best weights, on the host. `history` has a row for each epoch, and `report` is the
    report of the run. For a regression whose labels were standardised, the model is an `InLabelUnits`: it contains the
    network as `model`, and its outputs are in the labels' unit.
    """

    model: nn.Module
    history: Sequence[Row]
    report: TrainReport


def train(
    model: nn.Module | Callable[..., nn.Module] | str,
    dataset: Data,
    valid: Data | float | None = None,
    settings: TrainSettings | None = None,
    *,
    run: str | Path | None = None,
    device: Device | str = "auto",
    optimizer: OptimizerMaker | str | None = None,
    options: RunOptions | None = None,
) -> TrainResult:
    """Train a model on a cache, and return it with its best weights, its history and its report.

    `model` is a module, a callable that takes the number of outputs and returns a module, or a name as in
    `TrainSettings.model`. `valid` is a dataset, a cache, or a fraction of `dataset`. If each epoch has another variant,
    the clean images of this fraction are validated. `optimizer` is an optimizer's name as in `TrainSettings.optimizer`,
    or a callable of (parameter groups, lr); without it the settings choose the optimizer. The schedule of the settings
    sets the optimizer's learning rate. `device` is an opened device, or the name of a backend or of a device, as
    `open_device` takes them. "auto" is XLA with all cores on a TPU, else plain torch on a GPU or the CPU; a line on
    standard error says which, and why. `run` is the folder that the run writes to; without it only the result is kept.
    In a notebook with matplotlib, the curves are shown during training. When an epoch ends, a line about it goes to
    `options.on_epoch`, or else to standard error. A resumed run needs the same model and optimizer.

    Raises UsageError when these arguments do not fit together, and the errors of `tpucache.training.loop.train`.
    """
    settings = settings or TrainSettings()
    train_set, valid_set = _open_training(dataset), None
    if isinstance(valid, (int, float)):
        parts = stratified_split(train_set.labels.numpy(), float(valid), settings.seed)
        train_set, valid_set = train_set.select(parts.train), _clean(train_set, parts.valid)
    elif valid is not None:
        valid_set = _open(valid)
    if isinstance(model, str):
        settings, build = replace(settings, model=model), None
    else:
        settings, build = replace(settings, model=_name(model)), _builder(model)
    maker = find_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
    if isinstance(maker, str):
        settings, maker = replace(settings, optimizer=maker), None
    options = options or RunOptions()
    if isinstance(device, str):
        choice = _choose(device)
        if choice.why:
            note(f"{options.name}: {choice.line()}")
        options = replace(options, chosen=options.chosen or choice.why)
        device = _open_device(device, choice)
    watchers = [*options.watchers, *notebook_watchers()]
    options = replace(options, watchers=watchers, on_epoch=options.on_epoch or note)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(run or folder)
        report = run_training(kept, settings, train_set, valid_set, device, options, Custom(build, maker))
        saved = SavedRun(kept, device.processes.on_main(lambda: load_checkpoint(kept / BEST_NAME)))
    best, task = saved.load_model(build), saved.task
    if isinstance(task, Regression) and task.mean:
        best = InLabelUnits(best, task).eval()
    return TrainResult(best, report.epochs, report)


def _choose(name: str) -> Choice:
    """`name` is a backend such as "xla", a torch device such as "cuda", or "auto"."""
    return Choice("torch") if name in DEVICES and name != AUTO else choose_backend(name)


def _open_device(name: str, choice: Choice) -> Device:
    return open_device(choice.backend, device=name if name in DEVICES else AUTO)


def _open_training(data: Data) -> CachedDataset:
    dataset = _open(data)
    is_path = not isinstance(data, CachedDataset)
    return dataset.in_variant("epoch") if is_path and dataset.manifest.augmented else dataset


def _clean(dataset: CachedDataset, indices: npt.NDArray[np.int64]) -> CachedDataset:
    is_plain = type(dataset) is CachedDataset and not dataset.column_width  # `in_variant` keeps neither
    if dataset.variant != "epoch" or 0 not in dataset.manifest.variants or not is_plain:
        return dataset.select(indices)
    return dataset.in_variant(0).select(dataset.positions[indices])


def _open(data: Data) -> CachedDataset:
    return data if isinstance(data, CachedDataset) else CachedDataset(data)


def _name(model: nn.Module | Callable[..., nn.Module]) -> str:
    if isinstance(model, nn.Module):
        return f"object:{type(model).__name__}"
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", "")
    is_importable = (inspect.isfunction(model) or inspect.isclass(model)) and module != "__main__" and "<" not in name
    return f"{module}:{name}" if is_importable else f"object:{name or type(model).__name__}"


def _builder(model: nn.Module | Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    return (lambda *_: model) if isinstance(model, nn.Module) else model
