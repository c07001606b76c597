"""Trained models as one function: the mean of the predictions of several runs, and of mirrored images."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import nn

from tpucache.errors import UsageError
from tpucache.loading.dataset import COLUMNS, CachedDataset
from tpucache.ondevice.modules import Normalise
from tpucache.recipe import differing_images, image_settings
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, MASK
from tpucache.store.manifest import differ_in_values
from tpucache.training.device import Device
from tpucache.training.device.tensors import DeviceBatch
from tpucache.training.learn.forward import outputs_of
from tpucache.training.learn.learner import named_callable
from tpucache.training.options import PredictOptions
from tpucache.training.run.folds import run_folders
from tpucache.training.run.saved import SavedRun, load_run
from tpucache.training.sizes import in_size

PredictBatch = Callable[[DeviceBatch], torch.Tensor]

_log: Final = logging.getLogger("tpucache")

_AGREED: Final = ("task", "outputs", "classes")
_FEATURES: Final = "features"
_NAMED: Final = 5  # classes in a message, at most


class Predictor:
    """The models of one or more runs for the same task, in evaluation mode, each with its own normalisation."""

    def __init__(
        self,
        runs: Sequence[str | Path],
        device: Device,
        trust: Collection[str] = (),
        options: PredictOptions | None = None,
    ) -> None:
        """Load `best.pt` of each run, and of each fold of a run of folds.

        A model or an evaluation step of the user's, `module:name`, is imported only if `trust` has its name, too:
        whoever wrote the file could name any code. Each model computes in the precision of its run, or in float32 on a
        device without that precision. With several processes only the main process reads the folders.

        Raises TrainingError if there is no run; UsageError for runs that do not fit together, cannot be mirrored, or
        name code that is not trusted.
        """
        self.options = options or PredictOptions()
        saved = device.processes.on_main(
            lambda: [load_run(folder) for run in runs for folder in run_folders(Path(run))]
        )
        if device.processes.is_main:
            _warn_of_repeated([run.folder for run in saved])
        for run in saved:
            run.check_trusted(trust)
        first = saved[0]
        self.fields = first.inputs
        #: The names of the columns of values that the models predict; () if they are not known.
        self.value_names = next((run.value_names for run in saved if run.value_names), ())
        for run in saved:
            differing = [name for name in _AGREED if run.content[name] != first.content[name]]
            differing += ["fields"] if run.inputs != self.fields else []
            differing += ["columns of labels"] if differ_in_values(run.value_names, self.value_names) else []
            if differing:
                raise UsageError(
                    f"{run.folder} and {first.folder} cannot be averaged: the two runs differ in "
                    f"{', '.join(differing)}. Predict with each run alone"
                )
        if self.options.flip_tta:
            _check_mirrored(self.fields)
        self.device, self.runs = device, len(saved)
        self.settings, self.task = first.settings, first.task
        self.classes = self.task.class_names(first.content["classes"])
        if (self.options.logits or self.options.features) and self.task.form == "maps":
            raise UsageError(
                "the runs predict maps, whose logits and features are not written: leave --logits and --features out"
            )
        self._images = {run.folder: run.images for run in saved}
        self._learned_from = [
            (run.folder, run.content["fingerprint"], run.content["digests"], run.settings.sizes.valid)
            for run in saved
            if not run.columns.parts  # digests of samples with columns differ
        ]
        self._warned: set[str] = set()  # the caches that a warning was about
        self._columns = [run.columns for run in saved]
        self._predictions, start = [], 0
        for run in saved:
            own = slice(start, start + run.columns.width)
            self._predictions.append(_predictions(run, device, own, self.options))
            start += run.columns.width
        device.wait()  # otherwise the first batch's graph would also contain the upload of the weights

    def predict(self, batch: DeviceBatch) -> torch.Tensor:
        """Return probabilities or values, float32 (batch, …), averaged over the runs and the views."""
        return self.predict_runs(batch).mean(0)

    def predict_runs(self, batch: DeviceBatch) -> torch.Tensor:
        """Return the predictions of each run, float32 (runs, batch, …), averaged over the views.

        A sample's numbers are its predictions, then its logits and its features if the options ask for them. Raises
        UsageError for runs whose features have different lengths.
        """
        found = [self._predict_views(batch, predictions) for predictions in self._predictions]
        if len({each.shape for each in found}) > 1:
            raise UsageError("the runs' features have different lengths: predict with each run alone")
        return torch.stack(found)

    def _predict_views(self, batch: DeviceBatch, predictions: PredictBatch) -> torch.Tensor:
        found = predictions(batch)
        if not self.options.flip_tta:
            return found
        mirrored = predictions(_flip_batch(batch))
        # Maps (batch, outputs, height, width) are mirrored back; values describe the whole image.
        return (found + (mirrored.flip(3) if self.task.form == "maps" else mirrored)) / 2

    def may_have_seen(self, dataset: CachedDataset) -> list[Path]:
        """Return the folders of runs that learned from the dataset's cache, and were validated on other samples.

        The dataset has clean images in their stored size.
        """
        return [
            folder
            for folder, fingerprint, digests, size in self._learned_from
            if fingerprint == dataset.manifest.fingerprint
            and "validation" in digests
            and digests["validation"] != in_size(dataset, size).digest
        ]

    def prepare(self, dataset: CachedDataset) -> CachedDataset:
        """Return a cache's samples as the models take them, with the input columns of each run, encoded as in that run.

        The cache may have no labels, or other classes. Raises UsageError for a missing field, for one of another dtype
        or shape than the models learned from, and for columns that cannot be encoded.
        """
        self._check(dataset)
        self._tell_of_images(dataset)
        wanted = [columns for columns in self._columns if columns.parts]
        if not wanted:
            return dataset
        values = [each.encode(dataset.table, dataset.positions) for each in wanted]
        return dataset.with_columns(np.concatenate(values, 1))

    def _check(self, dataset: CachedDataset) -> None:
        found = {field.name: (field.dtype, tuple(field.shape)) for field in dataset.manifest.fields}
        for name, kind in self.fields.items():
            if found.get(name) != kind:
                other = "none" if name not in found else "{} {}".format(*found[name])
                raise UsageError(
                    f"the run learned from the field {name!r} of {kind[0]} {kind[1]}, and {dataset.directory} has "
                    f"{other}: warm up a cache with --like and the cache that the run learned from"
                )

    def _tell_of_images(self, dataset: CachedDataset) -> None:
        """Warn, once for each cache, if its images were made with another `fit` or `mode` than those of a run."""
        now = image_settings(dataset.manifest)
        found = ((folder, *differing_images(images, now)) for folder, images in self._images.items())
        folder, learned, given = next((each for each in found if each[1]), (None, "", ""))
        if folder is None or dataset.place in self._warned or not self.device.processes.is_main:
            return
        self._warned.add(dataset.place)
        _log.warning(
            "the images of %s were made with %s, and %s has learned from images that were made with %s, so its "
            "predictions may be worse: warm up a cache with --like and the cache that the run learned from",
            dataset.directory, given, folder, learned,
        )  # fmt: skip


def _warn_of_repeated(folders: Sequence[Path]) -> None:
    for folder, times in Counter(folder.resolve() for folder in folders).items():
        if times > 1:
            _log.warning("%s is given %d times, and its predictions count as often in the average", folder, times)


def _check_mirrored(fields: Mapping[str, object]) -> None:
    if IMAGE not in fields:
        raise UsageError("the models take no images: leave --flip-tta out")
    if points := [name for name in (BOXES, KEYPOINTS) if name in fields]:
        raise UsageError(
            f"the models take {' and '.join(points)}, which are not moved with the image: leave --flip-tta out"
        )


def _flip_batch(batch: DeviceBatch) -> DeviceBatch:
    mirrored = {name: batch.fields[name].flip(2) for name in (IMAGE, MASK) if name in batch.fields}
    return dataclasses.replace(batch, fields={**batch.fields, **mirrored})


def describe_difference(learned: Sequence[str], found: Sequence[str]) -> str:
    """Return a text that says how the classes of a cache, `found`, differ from those that a run has `learned`."""
    parts = []
    for verb, names in (
        ("lacks", [name for name in learned if name not in set(found)]),
        ("adds", [name for name in found if name not in set(learned)]),
    ):
        if names:
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            parts.append(f"{verb} {', '.join(map(repr, names[:_NAMED]))}{more}")
    return f"the cache {' and '.join(parts)}" if parts else "the cache has the same classes in another order"


def _predictions(run: SavedRun, device: Device, columns: slice, options: PredictOptions) -> PredictBatch:
    """Return the function that computes a run's predictions for a batch.

    If the options ask for logits and features, these follow the predictions in each row. `columns` is the slice of the
    batch's input columns that belongs to this run. Raises TrainingError for weights that do not fit.
    """
    settings, task, content = run.settings, run.task, run.content
    if settings.precision not in device.precisions:
        settings = dataclasses.replace(settings, precision="float32")
    own_model = run.load_model()
    taken: dict[str, torch.Tensor] = {}
    if options.features:
        _keep_features(own_model, content["outputs"], settings.model, taken)
    model = device.place(own_model).eval()
    normalise = None
    if IMAGE in run.fields:
        normalise = Normalise(content["mean"], content["std"], device.torch_device)
    eval_step = named_callable(settings.eval_step)

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
    """Let a model store the input of its last linear layer in `taken`, each time that the model is called.

    Raises UsageError if the model has no linear layer of `outputs` outputs. `name` is the model's name in the message.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == outputs]
    if not layers:
        raise UsageError(
            f"the model {name!r} does not end in a linear layer, so it has no features to write: leave --features out"
        )

    def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        taken[_FEATURES] = inputs[0].flatten(1)

    for layer in layers:  # the layer that is called last overwrites the others; the model may define them in any order
        layer.register_forward_pre_hook(keep)
