"""The best weights of one run or several, together on one device: what they predict is averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from tpucache.errors import TrainingError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.training.augment import Normalise
from tpucache.training.checkpoint import BEST_NAME, LAST_NAME, load_checkpoint
from tpucache.training.device import Device
from tpucache.training.feeder import IMAGE, DeviceBatch
from tpucache.training.learner import MASK, named_callable, outputs_of
from tpucache.training.models import build_model
from tpucache.training.settings import settings_from
from tpucache.training.tasks import Task, make_task

Outputs = Callable[[DeviceBatch], torch.Tensor]

_AGREED: Final = ("task", "outputs", "classes")


class Predictor:
    """The models of runs that learned one task, each with its own normalisation, in evaluation."""

    def __init__(self, runs: Sequence[Path], device: Device) -> None:
        """Load each run's `best.pt`. Raises TrainingError where there is none, UsageError for runs of two kinds."""
        contents = [_load_best(run) for run in runs]
        first = contents[0]
        self.fields = _inputs(first)
        for run, content in zip(runs, contents, strict=True):
            differing = [name for name in _AGREED if content[name] != first[name]]
            differing += ["fields"] if _inputs(content) != self.fields else []
            if differing:
                raise UsageError(
                    f"{run} and {runs[0]} cannot be averaged: they have other {', '.join(differing)}. "
                    "Predict with each of them alone"
                )
        self.device, self.runs = device, len(runs)
        self.settings = settings_from(first["settings"])
        self.task: Task = make_task(first["task"], first["outputs"])
        self.classes: tuple[str, ...] = tuple(first["classes"])
        self._outputs = [_outputs(run, content, device) for run, content in zip(runs, contents, strict=True)]
        device.wait()  # or the first batch's graph would also hold the upload of the weights

    def predict(self, batch: DeviceBatch) -> torch.Tensor:
        """Return probabilities or values, the mean over the runs: float32, the batch first."""
        total = torch.stack([self.task.predictions(outputs(batch)) for outputs in self._outputs])
        return total.mean(0)

    def check(self, dataset: CachedDataset) -> None:
        """Raise UsageError unless a cache has the fields, in the sizes, that the models have learned from."""
        found = {field.name: (field.dtype, tuple(field.shape)) for field in dataset.manifest.fields}
        for name, kind in self.fields.items():
            if found.get(name) != kind:
                told = "none" if name not in found else "{} {}".format(*found[name])
                raise UsageError(
                    f"the run learned from the field {name!r} of {kind[0]} {kind[1]}, and {dataset.directory} has "
                    f"{told}: warm it up with the options of the training cache"
                )


def _load_best(run: Path) -> dict[str, Any]:
    path = run / BEST_NAME
    if path.exists():
        return load_checkpoint(path)
    if (run / LAST_NAME).exists():
        raise TrainingError(f"{run} has no {BEST_NAME}, as no epoch of it has ended: go on with train --resume first")
    raise TrainingError(f"{run} holds no run: give the folder that was train's --run")


def _inputs(content: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return what a run's model takes: the image alone where there is one, and never the mask it is to find."""
    fields = {field["name"]: (field["dtype"], tuple(field["shape"])) for field in content["fields"]}
    if IMAGE in fields and content["settings"]["eval_step"] is None:
        return {IMAGE: fields[IMAGE]}
    if content["task"] == MASK:
        del fields[MASK]
    return fields


def _outputs(run: Path, content: Mapping[str, Any], device: Device) -> Outputs:
    """Return what gives a run's outputs for a batch."""
    settings = settings_from(content["settings"])
    model = build_model(settings.model, content["outputs"])
    try:
        model.load_state_dict(content["model"])
    except RuntimeError as error:
        raise TrainingError(f"{run / BEST_NAME} does not fit the model {settings.model!r}: {error}") from error
    model = device.place(model).eval()
    normalise = None
    if any(field["name"] == IMAGE for field in content["fields"]):
        normalise = Normalise(content["mean"], content["std"], device.torch_device)
    eval_step = named_callable(settings.eval_step)
    return lambda batch: outputs_of(model, batch, device, settings.bf16, normalise, eval_step)
