"""Predictions of trained models: `Predictor` computes them, `predict` writes them into files."""

from __future__ import annotations

import csv
import dataclasses
import io
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tpucache.errors import DependencyError, TrainingError, UsageError
from tpucache.loading.columns import columns_from
from tpucache.loading.dataset import COLUMNS, CachedDataset
from tpucache.ondevice.modules import Normalise
from tpucache.progress import Progress
from tpucache.runs import BEST_NAME, LAST_NAME, check_no_run_file
from tpucache.store.copying import check_no_cache_file
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, LABEL, MASK
from tpucache.store.files import write_atomically
from tpucache.training.device import Device
from tpucache.training.device.tensors import DeviceBatch
from tpucache.training.evaluation import compute_rows
from tpucache.training.learn.forward import outputs_of
from tpucache.training.learn.learner import named_callable
from tpucache.training.learn.model import build_model, is_user_code
from tpucache.training.learn.tasks.find import make_task
from tpucache.training.learn.tasks.task import SEPARATOR, Form, Task
from tpucache.training.learn.user_code import compute_metrics, load_metrics
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
        do not fit, cannot be mirrored, or name code that is not trusted. Each model computes in the precision of its
        run, in float32 on a device that does not have that.
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
        self.task = _task(folders[0], first)
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
    if settings.precision not in device.precisions:
        settings = dataclasses.replace(settings, precision="float32")
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
    """Return a run's task with its loss and what it took from its training labels.

    Raises TrainingError for what does not fit.
    """
    settings, task = settings_from(content["settings"]), make_task(content["task"], content["outputs"])
    try:
        return (task if settings.own_loss else task.with_loss(settings.loss)).with_constants(content.get("labels", {}))
    except UsageError as error:
        raise TrainingError(f"{run / BEST_NAME} cannot be used: {error}. Copy it again, or train again") from error


Array = npt.NDArray[Any]

_COLUMNS: Final = ("sample", "path", "label", "prediction")

_log = logging.getLogger("tpucache")


@dataclass(frozen=True)
class PredictReport:
    """What was predicted, and the task's metrics if the cache has labels of that task."""

    output: str
    samples: int
    task: str
    runs: int
    variants: Sequence[int | str]
    metrics: dict[str, float]
    flip_tta: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as lines for people."""
        parts = [f"{self.runs} models"] if self.runs > 1 else []
        parts += [f"{len(self.variants)} variants"] if len(self.variants) > 1 else []
        parts += ["the mirrored images, too"] if self.flip_tta else []
        averaged = f", averaged over {' and '.join(parts)}" if parts else ""
        summary = f"{self.samples:,} samples predicted{averaged}: {self.output}"
        return [summary, *(f"{name:<10} {value:.4f}" for name, value in self.metrics.items())]


@dataclass(frozen=True)
class _Predictions:
    """Each sample's prediction as text, named columns of values, float32 (samples, columns), and scores for metrics.

    Maps are scored where the cache has masks, and are None otherwise.
    """

    texts: Sequence[str]
    names: Sequence[str]
    values: Array
    scores: Array | None


@dataclass(frozen=True)
class _Work:
    """How predictions are made: in which batches, and what is called after each. Maps are `scored` where asked for."""

    output: Path
    batch_size: int
    threads: int
    progress: Progress
    check: Callable[[], None] = lambda: None
    scored: bool = False


def predict(
    predictor: Predictor, datasets: Sequence[CachedDataset], output: str | Path, batch_size: int, threads: int = 2
) -> PredictReport:
    """Write a CSV of predictions, averaged over the datasets, which are variants of one cache.

    Its columns are `sample` (the sample's number), `path`, `label` (empty where there is none), `prediction`, and a
    probability for each class or a value for each column. Class maps are PNG files in a folder next to the CSV, and
    `prediction` names them.
    Raises UsageError when cache, batch and device do not fit together, or `output` is a file of a cache or a run;
    TrainingError when a file cannot be written.
    """
    output, dataset, task = Path(output), datasets[0], predictor.task
    check_no_cache_file(output)
    check_no_run_file(output)
    cores = predictor.device.cores
    if batch_size % cores:
        fits = -(-batch_size // cores) * cores
        raise UsageError(f"a batch of {batch_size} does not divide over {cores} cores: give --batch-size {fits}")
    for each in datasets:
        predictor.check(each)
    datasets = [predictor.add_columns(each) for each in datasets]
    with Progress(len(dataset) * len(datasets), "predict", "images") as progress:
        found = _PREDICT[task.form](predictor, datasets, _Work(output, batch_size, threads, progress))
    _write(output, dataset, _labels(dataset, task), found)
    variants = [each.variant for each in datasets]
    metrics = {} if found.scores is None else _metrics(predictor, dataset, found.scores)
    return PredictReport(str(output), len(dataset), task.name, predictor.runs, variants, metrics, predictor.flip)


def predict_parts(
    parts: Iterable[tuple[Predictor, CachedDataset]],
    dataset: CachedDataset,
    output: Path,
    metric: Sequence[str] = (),
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Write the CSV of a whole cache, a part of it by each predictor; return the metrics over all samples.

    The rows are as `predict` writes them. Metrics are those of the task and those that `metric` names. `check` is
    called between batches, and what it raises ends this before the CSV is written. Raises as `predict` does.
    """
    check_no_cache_file(output)
    found, positions = [], []
    with Progress(len(dataset), "out of fold", "images") as progress:
        for predictor, part in parts:
            settings, task = predictor.settings, predictor.task
            work = _Work(output, settings.part_size, settings.threads, progress, check, scored=True)
            found.append(_PREDICT[task.form](predictor, [predictor.add_columns(part)], work))
            positions.append(part.positions)
    order = np.argsort(np.concatenate(positions))
    texts = [text for each in found for text in each.texts]
    values = np.concatenate([each.values for each in found])[order]
    # The counts of maps are added up, in any order.
    scores = values if task.form == "values" else np.concatenate([each.scores for each in found])
    labels = dataset.labels.numpy()
    own = compute_metrics(load_metrics(metric, task.metric_names, task), scores, labels)
    joined = _Predictions([texts[index] for index in order], found[0].names, values, scores)
    _write(output, dataset, _labels(dataset, task), joined)
    return {**task.metrics(scores, labels), **own}


def _predict_values(predictor: Predictor, datasets: Sequence[CachedDataset], work: _Work) -> _Predictions:
    """Return the mean of the values over the datasets, what they mean as text, and their metrics."""
    dataset, names = datasets[0], value_names(predictor)
    values = predict_values(predictor, datasets, work.batch_size, work.threads, work.progress, work.check)
    _check_finite(dataset, np.asarray(np.isfinite(values).all(1)))
    texts = [predictor.task.describe(row, names) for row in values]
    return _Predictions(texts, names, values, values)


def predict_values(
    predictor: Predictor,
    datasets: Sequence[CachedDataset],
    batch_size: int,
    threads: int,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
) -> Array:
    """Return probabilities or values, the mean over the datasets: float32 (samples, outputs), in the samples' order.

    `check` is called between batches.
    """
    total = np.zeros((len(datasets[0]), predictor.task.outputs))

    def compute(batch: DeviceBatch) -> tuple[torch.Tensor]:
        return (predictor.predict(batch),)

    for dataset in datasets:
        done = 0
        for (part,) in compute_rows(dataset, predictor.device, batch_size, threads, compute):
            total[done : done + len(part)] += part
            done += len(part)
            progress.advance(len(part))
            check()
    mean: Array = (total / len(datasets)).astype(np.float32)
    return mean


def value_names(predictor: Predictor) -> list[str]:
    """Return the names of the columns of values: the classes', or value, or value_0, value_1 …."""
    outputs = predictor.task.outputs
    if len(predictor.classes) == outputs:
        return list(predictor.classes)
    return ["value"] if outputs == 1 else [f"value_{number}" for number in range(outputs)]


def _predict_maps(predictor: Predictor, datasets: Sequence[CachedDataset], work: _Work) -> _Predictions:
    """Write each sample's map of classes as a PNG; return the files' names as seen from the CSV."""
    if len(datasets) > 1:
        raise UsageError("class maps of several variants cannot be averaged: augmentation has moved their pixels")
    try:
        from PIL import Image
    except ImportError as error:
        raise DependencyError(f"class maps are PNG files: `pip install pillow` to write them ({error})") from error
    dataset, folder, task = datasets[0], work.output.with_name(f"{work.output.stem}_maps"), predictor.task

    def class_map(batch: DeviceBatch) -> tuple[torch.Tensor, ...]:
        """Return the maps as small as they get before they are read, whether they are to be used, and their scores."""
        predictions = predictor.predict(batch)
        maps = predictions.argmax(1).to(torch.uint8), task.is_finite(predictions)
        return (*maps, task.scores(predictions, task.labels(batch.fields, batch.labels))) if work.scored else maps

    names: list[str] = []
    scores: list[Array] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for maps, finite, *counts in compute_rows(dataset, predictor.device, work.batch_size, work.threads, class_map):
            _check_finite(dataset, finite, len(names))
            for pixels in maps:
                path = folder / f"{dataset.numbers[len(names)]:06d}.png"
                Image.fromarray(pixels).save(path)
                names.append(f"{folder.name}/{path.name}")
            scores += [task.collect(each) for each in counts]
            work.progress.advance(len(maps))
            work.check()
    except OSError as error:
        raise TrainingError(f"{folder} cannot be written: {error}") from error
    values = np.empty((len(dataset), 0), np.float32)
    return _Predictions(names, [], values, np.concatenate(scores) if scores else None)


#: How the predictions of each form are made.
_PREDICT: Final[dict[Form, Callable[..., _Predictions]]] = {"values": _predict_values, "maps": _predict_maps}


def _metrics(predictor: Predictor, dataset: CachedDataset, values: Array) -> dict[str, float]:
    """Return the task's metrics, or nothing if the labels do not fit the task."""
    if not len(dataset) or LABEL not in dataset.table or dataset.classes != predictor.classes:
        return {}
    labels = dataset.labels.numpy()
    try:
        predictor.task.check(labels)
    except UsageError as error:
        _log.warning("no metrics: %s", error)
        return {}
    return predictor.task.metrics(values, labels)


def _check_finite(dataset: CachedDataset, finite: Array, first: int = 0) -> None:
    """Raise TrainingError unless the predictions of all samples from `first` on are finite."""
    bad = np.flatnonzero(~finite)
    if len(bad):
        raise TrainingError(
            f"the predictions of {len(bad):,} samples are not finite, the first that of "
            f"{dataset.paths[first + int(bad[0])]!r}: the run has diverged, or its model does not take such "
            "images. Nothing follows from such numbers"
        )


def _labels(dataset: CachedDataset, task: Task) -> list[str]:
    """Return the cache's labels in the same form as the predictions, empty where there are none."""
    if LABEL not in dataset.table:
        return [""] * len(dataset)
    labels = dataset.labels.numpy()
    if labels.ndim == 1:
        return [dataset.classes[label] if label >= 0 else "" for label in labels]
    try:
        task.check(labels)
    except UsageError:  # labels of another task: the values themselves
        return [SEPARATOR.join(map(str, row)) for row in labels]
    return [task.describe(row, dataset.classes) for row in labels]


def _write(output: Path, dataset: CachedDataset, labels: Sequence[str], found: _Predictions) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, *found.names])
    # str of a float32 is the shortest text that reads back as the same number.
    for number, path, label, prediction, row in zip(
        dataset.numbers.tolist(), dataset.paths, labels, found.texts, found.values, strict=True
    ):
        writer.writerow([number, path, label, prediction, *map(str, row)])
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, text.getvalue().encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise TrainingError(f"{output} cannot be written: {error}") from error
