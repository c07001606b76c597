"""The best weights of one or more runs on one device, whose predictions are averaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tpucache.errors import TrainingError, UsageError
from tpucache.loading.columns import columns_from
from tpucache.loading.dataset import COLUMNS, CachedDataset
from tpucache.ondevice.modules import Normalise
from tpucache.runs import BEST_NAME, LAST_NAME
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, MASK
from tpucache.training.device import Device
from tpucache.training.device.tensors import DeviceBatch
from tpucache.training.learn.forward import outputs_of
from tpucache.training.learn.learner import named_callable
from tpucache.training.learn.models import build_model, is_user_code
from tpucache.training.learn.tasks.base import Task
from tpucache.training.learn.tasks.find import make_task
from tpucache.training.run.contents import load_best
from tpucache.training.run.folds import run_folders
from tpucache.training.settings import TrainSettings, settings_from

Predictions = Callable[[DeviceBatch], torch.Tensor]

_AGREED: Final = ("task", "outputs", "classes")
_NAMED: Final = 5  # classes in a message, at most
_SHOWN: Final = 300  # characters of a library's message, at most


class Predictor:
    """The models of runs for the same task, each with its own normalisation, in evaluation mode."""

    def __init__(
        self, runs: Sequence[str | Path], device: Device, flip: bool = False, trust: Collection[str] = ()
    ) -> None:
        """Load each run's `best.pt`, those of all folds of a run of folds; `flip` also predicts mirrored images.

        A model or an evaluation step of the user's, `module:name`, is imported only if `trust` has its name, too:
        whoever wrote the file could name any code. Raises TrainingError where there is no run, UsageError for runs that
        do not fit, cannot be mirrored, or name code that is not trusted.
        """
        if device.processes.world_size > 1:
            raise UsageError("predictions are made by one process: start it without torchrun")
        folders = [folder for run in runs for folder in run_folders(Path(run))]
        contents = [_load_best(run) for run in folders]
        all_settings = [settings_from(content["settings"]) for content in contents]
        for run, settings in zip(folders, all_settings, strict=True):
            _check_trusted(run, settings, trust)
        first = contents[0]
        self.fields = _inputs(first)
        for run, content in zip(folders, contents, strict=True):
            differing = [name for name in _AGREED if content[name] != first[name]]
            differing += ["fields"] if _inputs(content) != self.fields else []
            if differing:
                raise UsageError(
                    f"{run} and {folders[0]} cannot be averaged: they have other {', '.join(differing)}. "
                    "Predict with each of them alone"
                )
        if flip:
            _check_flip(self.fields)
        self.device, self.runs, self.flip = device, len(folders), flip
        self.settings = all_settings[0]
        self.task: Task = make_task(first["task"], first["outputs"])
        self.classes = self.task.class_names(first["classes"])
        #: Of each run the columns of the samples table that its model takes, as its training samples have them.
        self._columns = [columns_from(content.get("columns", [])) for content in contents]
        self._predictions, start = [], 0
        for run, content, columns in zip(folders, contents, self._columns, strict=True):
            self._predictions.append(_predictions(run, content, device, slice(start, start + columns.width)))
            start += columns.width
        device.wait()  # otherwise the first batch's graph would also contain the upload of the weights

    def predict(self, batch: DeviceBatch) -> torch.Tensor:
        """Return probabilities or values, the mean over the runs and both ways round: float32, the batch first."""
        found = [predictions(batch) for predictions in self._predictions]
        if self.flip:
            mirrored = _flip_batch(batch)
            others = [predictions(mirrored) for predictions in self._predictions]
            # Maps (batch, outputs, height, width) are turned back; values are of the whole image.
            found += [each.flip(3) for each in others] if self.task.form == "maps" else others
        return torch.stack(found).mean(0)

    def add_columns(self, dataset: CachedDataset) -> CachedDataset:
        """Return a dataset with the columns that the models take, each as its run learned it. Raises UsageError."""
        wanted = [columns for columns in self._columns if columns.parts]
        if not wanted:
            return dataset
        values = [each.encode(dataset.table, dataset.positions) for each in wanted]
        return dataset.with_columns(np.concatenate(values, 1))

    def check(self, dataset: CachedDataset) -> None:
        """Raise UsageError unless a cache has the fields, sizes and classes that the models were trained with.

        A cache without classes, such as one without labels, may always be predicted.
        """
        found = {field.name: (field.dtype, tuple(field.shape)) for field in dataset.manifest.fields}
        for name, kind in self.fields.items():
            if found.get(name) != kind:
                other = "none" if name not in found else "{} {}".format(*found[name])
                raise UsageError(
                    f"the run learned from the field {name!r} of {kind[0]} {kind[1]}, and {dataset.directory} has "
                    f"{other}: warm it up with --like and the cache that the run learned from"
                )
        learned, found_classes = self.classes, self.task.class_names(dataset.classes)
        if learned and found_classes and learned != found_classes:
            raise UsageError(
                f"the run has learned other classes than those of {dataset.directory}: "
                f"{describe_difference(self.classes, dataset.classes)}. Its labels would be compared with other "
                "classes: warm it up with --like and the cache that the run learned from, or relabel it with --classes"
            )


def _check_flip(fields: Mapping[str, object]) -> None:
    """Raise UsageError unless a model's inputs can be mirrored."""
    if IMAGE not in fields:
        raise UsageError("the models take no images: leave --flip-tta out")
    if points := [name for name in (BOXES, KEYPOINTS) if name in fields]:
        raise UsageError(f"the models take {' and '.join(points)}, which are not mirrored: leave --flip-tta out")


def _flip_batch(batch: DeviceBatch) -> DeviceBatch:
    """Return a batch whose images and masks (batch, height, width, channels) are mirrored left to right."""
    mirrored = {name: batch.fields[name].flip(2) for name in (IMAGE, MASK) if name in batch.fields}
    return dataclasses.replace(batch, fields={**batch.fields, **mirrored})


def describe_difference(learned: Sequence[str], found: Sequence[str]) -> str:
    """Return in words how the classes of a cache differ from those a run has learned."""
    parts = []
    for verb, names in (
        ("lacks", [name for name in learned if name not in set(found)]),
        ("adds", [name for name in found if name not in set(learned)]),
    ):
        if names:
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            parts.append(f"{verb} {', '.join(map(repr, names[:_NAMED]))}{more}")
    return f"it {' and '.join(parts)}" if parts else "it has them in another order"


def _load_best(run: Path) -> dict[str, Any]:
    path = run / BEST_NAME
    if path.exists():
        return load_best(run)
    if (run / LAST_NAME).exists():
        raise TrainingError(
            f"{run} has no {BEST_NAME}, as no epoch of it has ended: continue it with train --resume first"
        )
    raise TrainingError(f"{run} holds no run: give the folder that was train's --run")


def _check_trusted(run: Path, settings: TrainSettings, trust: Collection[str]) -> None:
    """Raise UsageError where a run's file names code to be called that the user did not name."""
    trust = {trust} if isinstance(trust, str) else trust  # a text has each part of it
    called = [settings.model] if is_user_code(settings.model) else []
    called += [] if settings.eval_step is None else [settings.eval_step]
    if unknown := [name for name in called if name not in trust]:
        raise UsageError(
            f"{run / BEST_NAME} names code, {' and '.join(map(repr, unknown))}, that would be imported and called: if "
            f"you know it, add {' '.join(f'--trust {name}' for name in unknown)} (in Python trust={unknown})"
        )


def _inputs(content: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the inputs of a run's model: only the image if there is one, and never the labels."""
    fields = {field["name"]: (field["dtype"], tuple(field["shape"])) for field in content["fields"]}
    if IMAGE in fields and content["settings"]["eval_step"] is None:
        return {IMAGE: fields[IMAGE]}
    return make_task(content["task"], content["outputs"]).inputs(fields)


def _predictions(run: Path, content: Mapping[str, Any], device: Device, columns: slice) -> Predictions:
    """Return the function that computes a run's predictions for a batch. Raises TrainingError for what does not fit."""
    settings = settings_from(content["settings"])
    channels = next((field["shape"][2] for field in content["fields"] if field["name"] == IMAGE), 3)
    model = build_model(settings.model, content["outputs"], channels, columns.stop - columns.start)
    own, weights = model.state_dict(), content["model"]
    for name, tensor in weights.items():
        if name in own and tensor.dtype != own[name].dtype:
            raise TrainingError(
                f"{run / BEST_NAME} does not fit the model {settings.model!r}: {name} is {tensor.dtype}, not "
                f"{own[name].dtype}. Copy it again, or train again"
            )
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:_SHOWN]
        raise TrainingError(f"{run / BEST_NAME} does not fit the model {settings.model!r}: {reason}") from error
    model = device.place(model).eval()
    normalise = None
    if any(field["name"] == IMAGE for field in content["fields"]):
        normalise = Normalise(content["mean"], content["std"], device.torch_device)
    eval_step = named_callable(settings.eval_step)
    task = _task(run, content)

    def predictions(batch: DeviceBatch) -> torch.Tensor:
        own = {name: value for name, value in batch.fields.items() if name != COLUMNS}
        if columns.stop > columns.start:
            own[COLUMNS] = batch.fields[COLUMNS][:, columns]
        batch = dataclasses.replace(batch, fields=own)
        return task.predictions(outputs_of(model, batch, device, settings, task, normalise, eval_step))

    return predictions


def _task(run: Path, content: Mapping[str, Any]) -> Task:
    """Return a run's task with what it took from its training labels. Raises TrainingError for what does not fit."""
    try:
        return make_task(content["task"], content["outputs"]).with_constants(content.get("labels", {}))
    except UsageError as error:
        raise TrainingError(f"{run / BEST_NAME} cannot be used: {error}. Copy it again, or train again") from error
