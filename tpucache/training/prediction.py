"""Predicts the samples of caches by trained models, and writes tables of values, or pictures of class maps."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from tpucache.errors import DependencyError, TrainingError, UsageError, calling
from tpucache.loading.dataset import COLUMNS, CachedDataset
from tpucache.native import Array
from tpucache.ondevice.modules import Normalise
from tpucache.progress import Progress
from tpucache.recipe import differing_images, image_settings
from tpucache.runs import check_no_run_file
from tpucache.store.copying import check_no_cache_file
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, LABEL, MASK
from tpucache.store.manifest import differ_in_values, label_options
from tpucache.text import PREDICTION_COLUMNS, SEPARATOR, named, to_cell, to_csv, to_heading
from tpucache.training.device import Device
from tpucache.training.device.base import DeviceBatch
from tpucache.training.evaluation import shared_rows
from tpucache.training.forward import outputs_of
from tpucache.training.learner import named_callable
from tpucache.training.options import PredictOptions
from tpucache.training.run.report import run_folders
from tpucache.training.run.saved import SavedRun, load_run
from tpucache.training.settings import in_size
from tpucache.training.tasks.task import Form, Task
from tpucache.training.user_code import compute_metrics, load_metrics
from tpucache.training.weights import write_result

PredictBatch = Callable[[DeviceBatch], torch.Tensor]


_AGREED: Final = ("task", "outputs", "classes")
_FEATURES: Final = "features"


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
        self._warned: set[str] = set()  # the caches that a warning was about
        self._runs, self._predictions, start = [], [], 0
        for run in saved:
            own = slice(start, start + run.columns.width)
            self._predictions.append(_predictions(run, device, own, self.options))
            self._runs.append(dataclasses.replace(run, content={**run.content, "model": {}}))  # frees its weights
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
            run.folder
            for run in self._runs
            if not run.columns.parts  # digests of samples with columns differ
            and run.content["fingerprint"] == dataset.manifest.fingerprint
            and "validation" in run.content["digests"]
            and run.content["digests"]["validation"] != in_size(dataset, run.settings.sizes.valid).digest
        ]

    def prepare(self, dataset: CachedDataset) -> CachedDataset:
        """Return a cache's samples as the models take them, with the input columns of each run, encoded as in that run.

        The cache may have no labels, or other classes. Raises UsageError for a missing field, for one of another dtype
        or shape than the models learned from, and for columns that cannot be encoded.
        """
        self._check(dataset)
        self._tell_of_images(dataset)
        wanted = [run.columns for run in self._runs if run.columns.parts]
        values = [columns.encode(dataset.table, dataset.positions) for columns in wanted]
        return dataset.with_columns(np.concatenate(values, 1)) if values else dataset

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
        if dataset.place in self._warned or not self.device.processes.is_main:
            return
        for run in self._runs:
            learned, given = differing_images(run.images, image_settings(dataset.manifest))
            if learned:
                self._warned.add(dataset.place)
                _log.warning(
                    "the images of %s were made with %s, and %s has learned from images that were made with %s, so its "
                    "predictions may be worse: warm up a cache with --like and the cache that the run learned from",
                    dataset.directory, given, run.folder, learned,
                )  # fmt: skip
                return


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
    parts = []
    for verb, names in (
        ("lacks", [name for name in learned if name not in set(found)]),
        ("adds", [name for name in found if name not in set(learned)]),
    ):
        if names:
            parts.append(f"{verb} {named(map(repr, names))}")
    return f"the cache {' and '.join(parts)}" if parts else "the cache has the same classes in another order"


def _predictions(run: SavedRun, device: Device, columns: slice, options: PredictOptions) -> PredictBatch:
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
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == outputs]
    if not layers:
        raise UsageError(
            f"the model {name!r} does not end in a linear layer, so it has no features to write: leave --features out"
        )

    def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        taken[_FEATURES] = inputs[0].flatten(1)

    for layer in layers:  # the layer that is called last overwrites the others; the model may define them in any order
        layer.register_forward_pre_hook(keep)


#: The arrays that are written next to the CSV, in their order in a row of predictions.
_ARRAYS: Final = ("logits", "features")


_log = logging.getLogger("tpucache")


@dataclass(frozen=True)
class PredictReport:
    """What was predicted, and the task's metrics if the cache has labels of that task.

    `output` is the CSV, `runs` the number of models, and `variants` the variants of the cache that were averaged.
    `logits` and `features` are the paths of the files with these arrays, None if they were not asked for.
    """

    output: str
    samples: int
    task: str
    runs: int
    variants: Sequence[int | str]
    metrics: dict[str, float]
    flip_tta: bool = False
    logits: str | None = None
    features: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        parts = [f"{self.runs} models"] if self.runs > 1 else []
        parts += [f"{len(self.variants)} variants"] if len(self.variants) > 1 else []
        parts += ["the mirrored images, too"] if self.flip_tta else []
        averaged = f", averaged over {' and '.join(parts)}" if parts else ""
        summary = f"{self.samples:,} samples predicted{averaged}: {self.output}"
        others = [f"{name:<10} {path}" for name in _ARRAYS if (path := getattr(self, name)) is not None]
        return [summary, *others, *(f"{name:<10} {value:.4f}" for name, value in self.metrics.items())]


@dataclass(frozen=True)
class PredictedSamples:
    """The predictions of all samples as `texts`, and the scores that metrics are computed from.

    `values`, float32 (samples, columns), become columns of the CSV with these `names`. `scores` are None for maps that
    were not compared with masks. `arrays` has logits and features.
    """

    texts: Sequence[str]
    names: Sequence[str]
    values: Array
    scores: Array | None
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class _Work:
    """How predictions are made: batch size, threads, progress, and a function `check` that is called after each batch.

    Class maps are written next to `output`. With `scored`, they are also compared with the samples' masks.
    """

    output: Path
    batch_size: int
    threads: int
    progress: Progress
    check: Callable[[], None] = lambda: None
    scored: bool = False

    def rows(
        self, device: Device, dataset: CachedDataset, compute: Callable[[DeviceBatch], tuple[torch.Tensor, ...]]
    ) -> Iterator[list[tuple[int, tuple[Array, ...]]]]:
        """Yield the results of `compute` for each batch; see `shared_rows`."""
        for found in shared_rows(dataset, device, self.batch_size, self.threads, compute, self.check):
            yield found
            self.progress.advance(sum(len(parts[0]) for _, parts in found))


def predict(
    predictor: Predictor,
    datasets: Sequence[CachedDataset],
    output: str | Path,
    batch_size: int,
    threads: int = 2,
) -> PredictReport:
    """Write a CSV of predictions, averaged over the datasets, which are variants of one cache; return a report.

    The columns of the CSV are `sample` (the sample's number), `path`, `label` (empty if there is none), `prediction`,
    and a probability for each class or a value for each column. Class maps are PNG files in a folder next to the CSV,
    and `prediction` names them.

    If the predictor's options ask for logits and features, they are arrays next to the CSV, OUT_logits.npy and
    OUT_features.npy: float32 (samples, runs, numbers), averaged over views and variants.

    With several processes, each process predicts its share of the samples, and the main process writes the files.
    Raises UsageError when cache, batch, task and device do not fit together, or `output` is a file of a cache or a run;
    TrainingError when predictions are not finite, or a file cannot be written; DependencyError for maps without Pillow.
    """
    output, dataset, task = Path(output), datasets[0], predictor.task
    processes, options = predictor.device.processes, predictor.options
    processes.on_main(lambda: check_no_cache_file(output))
    processes.on_main(lambda: check_no_run_file(output))
    paths = {name: output.with_name(f"{output.stem}_{name}.npy") for name in _ARRAYS if getattr(options, name)}
    cores = predictor.device.cores * processes.world_size
    if batch_size % cores:
        fits = -(-batch_size // cores) * cores
        over = f"{processes.world_size} processes" if processes.world_size > 1 else f"{cores} cores"
        raise UsageError(f"a batch of {batch_size} does not divide over {over}: give --batch-size {fits}")
    if any(each.place != dataset.place or not np.array_equal(each.positions, dataset.positions) for each in datasets):
        raise UsageError(
            "the datasets have other samples, or the same in another order, and predictions are averaged row by row: "
            "give the same samples of one cache in several variants"
        )
    datasets = [predictor.prepare(each) for each in datasets]
    with Progress(len(dataset) * len(datasets), "predict", "images") as progress:
        found = _PREDICT[task.form](predictor, datasets, _Work(output, batch_size, threads, progress))

    def write() -> PredictReport:
        write_table(output, dataset, _labels(dataset, task), found)
        for name, path in paths.items():
            file = io.BytesIO()
            np.save(file, found.arrays[name].astype(np.float32))
            write_result(path, file.getvalue())
        variants = [each.variant for each in datasets]
        metrics = {} if found.scores is None else _metrics(predictor, dataset, found.scores)
        return PredictReport(
            str(output),
            len(dataset),
            task.name,
            predictor.runs,
            variants,
            metrics,
            options.flip_tta,
            **{name: str(path) for name, path in paths.items()},
        )

    return processes.on_main(write)


def predict_parts(
    parts: Iterable[tuple[Predictor, CachedDataset]],
    dataset: CachedDataset,
    output: Path,
    metric: Sequence[str] = (),
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Write one CSV for a whole cache; each predictor predicts a part of it."""
    found: list[PredictedSamples] = []
    positions: list[Array] = []
    with Progress(len(dataset), "out of fold", "images") as progress:
        for predictor, part in parts:
            settings, task, processes = predictor.settings, predictor.task, predictor.device.processes
            if not found:
                processes.on_main(lambda: check_no_cache_file(output))
            batch_size = -(-settings.part_size // processes.world_size) * processes.world_size
            work = _Work(output, batch_size, settings.threads, progress, check, scored=True)
            seen = predictor.prepare(in_size(part, settings.sizes.valid))
            found.append(_PREDICT[task.form](predictor, [seen], work))
            positions.append(part.positions)

    def write() -> dict[str, float]:
        order = np.argsort(np.concatenate(positions))
        texts = [text for each in found for text in each.texts]
        values = np.concatenate([each.values for each in found])[order]
        # The scores of maps are counts, to be added up: their order does not matter.
        scores = values if task.form == "values" else np.concatenate([each.scores for each in found])
        labels = dataset.labels.numpy()
        own = compute_metrics(load_metrics(metric, task.metric_names), scores, labels)
        joined = PredictedSamples([texts[index] for index in order], found[0].names, values, scores)
        write_table(output, dataset, _labels(dataset, task), joined)
        return {**task.metrics(scores, labels), **own}

    return processes.on_main(write)


def _predict_values(predictor: Predictor, datasets: Sequence[CachedDataset], work: _Work) -> PredictedSamples:
    dataset, names, outputs = datasets[0], value_names(predictor), predictor.task.outputs
    total = np.zeros((len(dataset), predictor.runs, outputs))
    for each in datasets:
        rows = work.rows(predictor.device, each, lambda batch: (predictor.predict_runs(batch).swapaxes(0, 1),))
        for first, (part,) in itertools.chain.from_iterable(rows):
            if part.shape[2] > total.shape[2]:  # the rows also have logits and features
                total = np.zeros((*total.shape[:2], part.shape[2]))
            total[first : first + len(part)] += part
    parts = ["predictions", *(name for name in _ARRAYS if getattr(predictor.options, name))]
    ends = [outputs * number for number in range(1, len(parts))]  # features, which are last, have any length
    arrays = dict(zip(parts, np.split(total / len(datasets), ends, 2), strict=True))
    found = arrays.pop("predictions")
    predictor.device.processes.on_main(lambda: _check_finite(dataset, np.asarray(np.isfinite(found).all((1, 2)))))
    values = found.mean(1).astype(np.float32)
    texts = [predictor.task.describe(row, names) for row in values]
    return PredictedSamples(texts, names, values, values, arrays)


def value_names(predictor: Predictor) -> list[str]:
    """Return the names of the columns of values.

    They are the classes' names if each output belongs to a class, otherwise `value`, or `value_0`, `value_1` …
    """
    outputs = predictor.task.outputs
    if len(predictor.classes) == outputs:
        return list(predictor.classes)
    return ["value"] if outputs == 1 else [f"value_{number}" for number in range(outputs)]


def _predict_maps(predictor: Predictor, datasets: Sequence[CachedDataset], work: _Work) -> PredictedSamples:
    if len(datasets) > 1:
        raise UsageError(
            "class maps of several variants cannot be averaged, as augmentation has moved their pixels: give one "
            "variant"
        )
    try:
        from PIL import Image
    except ImportError as error:
        raise DependencyError(f"class maps are PNG files: run `pip install pillow` to write them ({error})") from error
    dataset, folder, task = datasets[0], work.output.with_name(f"{work.output.stem}_maps"), predictor.task

    def class_map(batch: DeviceBatch) -> tuple[torch.Tensor, ...]:
        """Return uint8 class maps, whether each map's predictions are finite, and the maps' scores if `work.scored`."""
        predictions = predictor.predict(batch)
        maps = predictions.argmax(1).to(torch.uint8), task.is_finite(predictions)
        return (*maps, task.scores(predictions, task.labels(batch.fields, batch.labels))) if work.scored else maps

    names: dict[int, str] = {}
    scores: list[Array] = []

    @calling("Pillow")
    def write(found: Sequence[tuple[int, tuple[Array, ...]]]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for first, (maps, finite, *counts) in found:
                _check_finite(dataset, finite, first)
                for row, pixels in enumerate(maps, first):
                    path = folder / f"{dataset.numbers[row]:06d}.png"
                    Image.fromarray(pixels).save(path)
                    names[row] = f"{folder.name}/{path.name}"
                scores.extend(task.collect(each) for each in counts)
        except OSError as error:
            raise TrainingError(f"{folder} cannot be written: {error}") from error

    for found in work.rows(predictor.device, dataset, class_map):
        predictor.device.processes.on_main(functools.partial(write, found))
    values = np.empty((len(dataset), 0), np.float32)
    texts = [names[row] for row in sorted(names)]
    return PredictedSamples(texts, [], values, np.concatenate(scores) if scores else None)


#: The function that makes the predictions of a task, by their form: values or class maps.
_PREDICT: Final[dict[Form, Callable[..., PredictedSamples]]] = {"values": _predict_values, "maps": _predict_maps}


def _metrics(predictor: Predictor, dataset: CachedDataset, values: Array) -> dict[str, float]:
    if not len(dataset) or LABEL not in dataset.table:
        return {}
    if dataset.classes != predictor.classes:
        _log.warning(
            "no metrics: the run has learned other classes than those of %s: %s. Relabel that cache with --classes if "
            "the same classes are meant", dataset.directory, describe_difference(predictor.classes, dataset.classes),
        )  # fmt: skip
        return {}
    names = dataset.manifest.value_names
    if predictor.task.form == "values" and differ_in_values(names, predictor.value_names):
        _log.warning(
            "no metrics: the labels of %s are the columns %s, and the run has learned %s. Relabel that cache with %s",
            dataset.directory, ", ".join(names), ", ".join(predictor.value_names), label_options(predictor.value_names),
        )  # fmt: skip
        return {}
    labels = dataset.labels.numpy()
    try:
        predictor.task.check(labels)
    except UsageError as error:
        _log.warning("no metrics: %s", error)
        return {}
    return predictor.task.metrics(values, labels)


def _check_finite(dataset: CachedDataset, finite: Array, first: int = 0) -> None:
    bad = np.flatnonzero(~finite)
    if len(bad):
        raise TrainingError(
            f"the predictions of {len(bad):,} samples are not finite, the first that of "
            f"{dataset.paths[first + int(bad[0])]!r}: the run has diverged, or its model does not take such "
            "images. Predict with another run"
        )


def _labels(dataset: CachedDataset, task: Task) -> list[str]:
    if LABEL not in dataset.table:
        return [""] * len(dataset)
    labels = dataset.labels.numpy()
    if labels.ndim == 1:
        return [dataset.classes[label] if label >= 0 else "" for label in labels]
    try:
        task.check(labels)
        is_other = task.name == "multilabel" and not dataset.classes
    except UsageError:
        is_other = True
    if is_other:  # labels of another task: write their values
        return [SEPARATOR.join(map(str, row)) for row in labels]
    return [task.describe(row, dataset.classes) for row in labels]


def write_table(output: Path, dataset: CachedDataset, labels: Sequence[str], found: PredictedSamples) -> None:
    rows = zip(dataset.numbers.tolist(), dataset.paths, labels, found.texts, found.values, strict=True)
    # str of a float32 is the shortest text that reads back as the same number.
    cells = ([number, *map(to_cell, texts), *map(str, row)] for number, *texts, row in rows)
    write_result(output, to_csv([[*PREDICTION_COLUMNS, *map(to_heading, found.names)], *cells]))
