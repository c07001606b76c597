"""Trained models as one function: the weighted mean of the predictions of runs, and of views of each image."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from tpucache.errors import TrainingError, UsageError
from tpucache.loading.columns import columns_from
from tpucache.loading.dataset import COLUMNS, CachedDataset
from tpucache.ondevice.modules import Normalise
from tpucache.runs import BEST_NAME, LAST_NAME
from tpucache.store.codecs import CODECS
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, MASK
from tpucache.store.manifest import Manifest
from tpucache.training.device import Device
from tpucache.training.device.tensors import DeviceBatch
from tpucache.training.learn.forward import outputs_of
from tpucache.training.learn.learner import named_callable
from tpucache.training.learn.model import build_model, is_user_code
from tpucache.training.learn.tasks.find import find_watched, make_task
from tpucache.training.learn.tasks.task import Task
from tpucache.training.predict_options import PredictOptions
from tpucache.training.run.contents import load_best
from tpucache.training.run.folds import run_folders
from tpucache.training.run.report import read_report
from tpucache.training.settings import TrainSettings, settings_from
from tpucache.training.tta import Views

Predictions = Callable[[DeviceBatch], torch.Tensor]

_AGREED: Final = ("task", "outputs", "classes")
_FEATURES: Final = "features"
_NAMED: Final = 5  # classes in a message, at most
_SHOWN: Final = 300  # characters of a library's message, at most


class Predictor:
    """The models of runs for the same task, each with its own normalisation, in evaluation mode."""

    def __init__(
        self,
        runs: Sequence[str | Path],
        device: Device,
        flip: bool = False,
        trust: Collection[str] = (),
        options: PredictOptions | None = None,
    ) -> None:
        """Load each run's `best.pt`, those of all folds of a run of folds; `flip` is short for `flip_tta` in `options`.

        Weighted by their scores, runs count by the validation metric of their best epoch, that of `watch` or of the
        task: of a fold it is that of the samples that its model has not seen. Where less of it is better, they count by
        1 over it.

        A model or an evaluation step of the user's, `module:name`, is imported only if `trust` has its name, too:
        whoever wrote the file could name any code. Each model computes in the precision of its run, in float32 on a
        device that does not have that. Of several processes the main one alone reads the folders.

        Raises TrainingError where there is no run, UsageError for runs that do not fit, cannot be shown in these views
        or weighted, or name code that is not trusted.
        """
        options = options or PredictOptions()
        self.options = dataclasses.replace(options, flip_tta=flip or options.flip_tta)

        def read() -> tuple[list[Path], list[dict[str, Any]], list[float] | None]:
            folders = [folder for run in runs for folder in run_folders(Path(run))]
            contents = [load_run(run) for run in folders]
            if self.options.run_weights == "equal":
                return folders, contents, None
            return folders, contents, [_score(run, each) for run, each in zip(folders, contents, strict=True)]

        folders, contents, scores = device.processes.on_main(read)
        all_settings = [settings_from(content["settings"]) for content in contents]
        for run, settings in zip(folders, all_settings, strict=True):
            check_trusted(run, settings, trust)
        first = contents[0]
        self.fields = inputs_of(first)
        for run, content in zip(folders, contents, strict=True):
            differing = [name for name in _AGREED if content[name] != first[name]]
            differing += ["fields"] if inputs_of(content) != self.fields else []
            if differing:
                raise UsageError(
                    f"{run} and {folders[0]} cannot be averaged: they have other {', '.join(differing)}. "
                    "Predict with each of them alone"
                )
        _check_views(self.options, self.fields)
        if (self.options.logits or self.options.features) and make_task(first["task"], first["outputs"]).form == "maps":
            raise UsageError(
                "the runs predict maps, whose logits and features are not written: leave --logits and --features out"
            )
        self.device, self.runs = device, len(folders)
        #: How much each run counts; they add up to 1.
        self.weights = [1 / len(folders)] * len(folders) if scores is None else _normalised(scores, folders)
        self._is_weighted = scores is not None
        self.settings = all_settings[0]
        self.task = task_of(folders[0], first)
        self.classes = self.task.class_names(first["classes"])
        #: Of each run the columns of the samples table that its model takes, as its training samples have them.
        self._columns = [columns_from(content.get("columns", [])) for content in contents]
        self._predictions, start = [], 0
        for run, content, columns in zip(folders, contents, self._columns, strict=True):
            own = slice(start, start + columns.width)
            self._predictions.append(_predictions(run, content, device, own, self.options))
            start += columns.width
        self._views: dict[tuple[int, int], Views] = {}
        device.wait()  # otherwise the first batch's graph would also contain the upload of the weights

    def predict(self, batch: DeviceBatch) -> torch.Tensor:
        """Return probabilities or values, the mean over the runs and the views: float32, the batch first."""
        found = self.predict_runs(batch)
        if not self._is_weighted:
            return found.mean(0)
        total: torch.Tensor = sum(weight * each for weight, each in zip(self.weights, found, strict=True))
        return total

    def predict_runs(self, batch: DeviceBatch) -> torch.Tensor:
        """Return those of each run, the mean over the views: float32, the runs first.

        Each row has the predictions, then the logits and the features where the options ask for them. Raises UsageError
        for runs whose features have different lengths.
        """
        found = [self._predict_views(batch, predictions) for predictions in self._predictions]
        if len({each.shape for each in found}) > 1:
            raise UsageError("the runs' features have different lengths: predict with each run alone")
        return torch.stack(found)

    def _predict_views(self, batch: DeviceBatch, predictions: Predictions) -> torch.Tensor:
        if self.options.resamples:

            def of_images(images: torch.Tensor) -> torch.Tensor:
                return predictions(dataclasses.replace(batch, fields={**batch.fields, IMAGE: images}))

            return self._views_of(batch.images).mean(batch.images, of_images)
        found = predictions(batch)
        if not self.options.flip_tta:
            return found
        mirrored = predictions(_flip_batch(batch))
        # Maps (batch, outputs, height, width) are turned back; values are of the whole image.
        return (found + (mirrored.flip(3) if self.task.form == "maps" else mirrored)) / 2

    def _views_of(self, images: torch.Tensor) -> Views:
        given = images.shape[1], images.shape[2]
        if given not in self._views:
            self._views[given] = Views(self.options, self._learned, given, self.device.torch_device)
            self.device.wait()  # for the upload of its matrices, as above
        return self._views[given]

    @property
    def _learned(self) -> tuple[int, int]:
        """The height and width of the images that the models were evaluated on."""
        height, width, *_ = self.fields[IMAGE][1]
        return height, width

    def resolution(self, manifest: Manifest) -> int | None:
        """Return in which resolution a cache's images are best read for the views; None for the one they have.

        Images that come in any size are read as large as the largest view, as far as they are.
        """
        wanted = self.settings.sizes.valid
        image = next((field for field in manifest.fields if field.name == IMAGE), None)
        if not self.options.resamples or image is None or not CODECS[image.codec].has_frequencies:
            return wanted
        if self.task.form == "maps" or image.shape[0] != image.shape[1]:
            return wanted
        return min(image.shape[0], self.options.largest(self._learned))

    def add_columns(self, dataset: CachedDataset) -> CachedDataset:
        """Return a dataset with the columns that the models take, each as its run learned it. Raises UsageError."""
        wanted = [columns for columns in self._columns if columns.parts]
        if not wanted:
            return dataset
        values = [each.encode(dataset.table, dataset.positions) for each in wanted]
        return dataset.with_columns(np.concatenate(values, 1))

    def check(self, dataset: CachedDataset) -> None:
        """Raise UsageError unless a cache has the fields and sizes that the models were trained with.

        A cache without labels or with other classes may be predicted.
        """
        found = {field.name: (field.dtype, tuple(field.shape)) for field in dataset.manifest.fields}
        for name, kind in self.fields.items():
            if self.options.resamples and name == IMAGE and name in found:  # views are made of images of any size
                found[name] = found[name][0], (*self._learned, found[name][1][2])
            if found.get(name) != kind:
                other = "none" if name not in found else "{} {}".format(*found[name])
                raise UsageError(
                    f"the run learned from the field {name!r} of {kind[0]} {kind[1]}, and {dataset.directory} has "
                    f"{other}: warm it up with --like and the cache that the run learned from"
                )


def _check_views(options: PredictOptions, fields: Mapping[str, object]) -> None:
    """Raise UsageError unless a model's inputs can be shown in such views."""
    names = options.view_names
    if not names:
        return
    if IMAGE not in fields:
        raise UsageError(f"the models take no images: leave {' and '.join(names)} out")
    if points := [name for name in (BOXES, KEYPOINTS) if name in fields]:
        raise UsageError(
            f"the models take {' and '.join(points)}, which are not moved with the image: leave {' and '.join(names)} "
            "out"
        )
    if options.resamples and (others := [name for name in fields if name != IMAGE]):
        raise UsageError(
            f"the models take {' and '.join(others)}, too, which would not fit a crop or another size: leave "
            f"{' and '.join(name for name in names if name != '--flip-tta')} out"
        )


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


def load_run(run: Path) -> dict[str, Any]:
    """Return what the best weights' file of a run holds. Raises TrainingError where there is none."""
    path = run / BEST_NAME
    if path.exists():
        return load_best(run)
    if (run / LAST_NAME).exists():
        raise TrainingError(
            f"{run} has no {BEST_NAME}, as no epoch of it has ended: continue it with train --resume first"
        )
    raise TrainingError(f"{run} holds no run: give the folder that was train's --run")


def check_trusted(run: Path, settings: TrainSettings, trust: Collection[str]) -> None:
    """Raise UsageError where a run's file names code to be called that the user did not name."""
    trust = {trust} if isinstance(trust, str) else trust  # a text has each part of it
    called = [settings.model] if is_user_code(settings.model) else []
    called += [] if settings.eval_step is None else [settings.eval_step]
    if unknown := [name for name in called if name not in trust]:
        raise UsageError(
            f"{run / BEST_NAME} names code, {' and '.join(map(repr, unknown))}, that would be imported and called: if "
            f"you know it, add {' '.join(f'--trust {name}' for name in unknown)} (in Python trust={unknown})"
        )


def inputs_of(content: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the inputs of a run's model: only the image if there is one, and never the labels."""
    fields = {field["name"]: (field["dtype"], tuple(field["shape"])) for field in content["fields"]}
    if IMAGE in fields and content["settings"]["eval_step"] is None:
        return {IMAGE: fields[IMAGE]}
    return make_task(content["task"], content["outputs"]).inputs(fields)


def _score(run: Path, content: Mapping[str, Any]) -> float:
    """Return a run's validation metric in its best epoch, more where it is better. Raises UsageError without one."""
    watched = find_watched(task_of(run, content), settings_from(content["settings"]))
    report = read_report(run)
    row = report.epochs[report.best_epoch - 1] if report is not None and report.epochs else {}
    value = row.get(f"valid_{watched.metric}")
    if value is None:
        raise UsageError(
            f"{run} has no validation score {watched.metric!r} to weight it by: train with --valid, or leave "
            "--run-weights out"
        )
    if not 0 <= value < float("inf") or (value == 0 and not watched.more_is_better):
        raise UsageError(
            f"the {watched.metric} of {run} is {value:g}, and only numbers above 0 weight runs: leave --run-weights out"
        )
    return float(value) if watched.more_is_better else 1 / float(value)


def _normalised(scores: Sequence[float], folders: Sequence[Path]) -> list[float]:
    """Return scores as shares of their sum. Raises UsageError where all are 0."""
    total = sum(scores)
    if not total > 0:
        raise UsageError(f"all scores of {folders[0]} and the other runs are 0: leave --run-weights out")
    return [score / total for score in scores]


def load_model(run: Path, content: Mapping[str, Any], columns: int) -> nn.Module:
    """Return a run's model with its best weights, on the host. Raises TrainingError for what does not fit."""
    settings = settings_from(content["settings"])
    channels = next((field["shape"][2] for field in content["fields"] if field["name"] == IMAGE), 3)
    model = build_model(settings.model, content["outputs"], channels, columns)
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
    return model.eval()


def _predictions(
    run: Path, content: Mapping[str, Any], device: Device, columns: slice, options: PredictOptions
) -> Predictions:
    """Return the function that computes a run's predictions for a batch, logits and features after them in each row.

    Raises TrainingError for what does not fit.
    """
    settings = settings_from(content["settings"])
    if settings.precision not in device.precisions:
        settings = dataclasses.replace(settings, precision="float32")
    own_model = load_model(run, content, columns.stop - columns.start)
    taken: dict[str, torch.Tensor] = {}
    if options.features:
        _keep_features(own_model, content["outputs"], settings.model, taken)
    model = device.place(own_model).eval()
    normalise = None
    if any(field["name"] == IMAGE for field in content["fields"]):
        normalise = Normalise(content["mean"], content["std"], device.torch_device)
    eval_step = named_callable(settings.eval_step)
    task = task_of(run, content)

    def predictions(batch: DeviceBatch) -> torch.Tensor:
        own = {name: value for name, value in batch.fields.items() if name != COLUMNS}
        if columns.stop > columns.start:
            own[COLUMNS] = batch.fields[COLUMNS][:, columns]
        batch = dataclasses.replace(batch, fields=own)
        outputs = outputs_of(model, batch, device, settings, task, normalise, eval_step)
        parts = [task.predictions(outputs)]
        parts += [outputs] if options.logits else []
        parts += [taken.pop(_FEATURES).float()] if options.features else []
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    return predictions


def _keep_features(model: nn.Module, outputs: int, name: str, taken: dict[str, torch.Tensor]) -> None:
    """Have a model put what its last linear layer takes into `taken`. Raises UsageError without such a layer."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == outputs]
    if not layers:
        raise UsageError(
            f"the model {name!r} ends in no linear layer, whose input would be features: leave --features out"
        )

    def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        taken[_FEATURES] = inputs[0].flatten(1)

    for layer in layers:  # the one that is called last stays, whatever order the model defines its layers in
        layer.register_forward_pre_hook(keep)


def task_of(run: Path, content: Mapping[str, Any]) -> Task:
    """Return a run's task with its loss and what it took from its training labels.

    Raises TrainingError for what does not fit.
    """
    settings, task = settings_from(content["settings"]), make_task(content["task"], content["outputs"])
    try:
        return (task if settings.own_loss else task.with_loss(settings.loss)).with_constants(content.get("labels", {}))
    except UsageError as error:
        raise TrainingError(f"{run / BEST_NAME} cannot be used: {error}. Copy it again, or train again") from error
