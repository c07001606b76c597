"""A cache -> a CSV with one row for each sample: the predictions of one run, or the mean of several."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tpucache.errors import DependencyError, TrainingError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.progress import Progress
from tpucache.runs import check_no_run_file
from tpucache.store.copying import check_no_cache_file
from tpucache.store.fields import LABEL
from tpucache.store.files import write_atomically
from tpucache.training.device.tensors import DeviceBatch
from tpucache.training.evaluation import compute_rows
from tpucache.training.learn.tasks.base import SEPARATOR, Form, Task
from tpucache.training.learn.user_code import compute_metrics, load_metrics
from tpucache.training.predictor import Predictor

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
        each = f"{self.runs} x {len(self.variants)}{' x 2' * self.flip_tta}"
        summary = f"{self.samples:,} samples, {each} predictions of each averaged: {self.output}"
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

    The rows are as `predict` writes them. Metrics are those of the task and `metric`, names of the user's. `check` is
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
    own = compute_metrics(load_metrics(metric, task.metric_names), scores, labels)
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
