"""The data of a run: its task, columns, soft labels and image size, found once and checked before the first step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final

from tpucache.errors import UsageError
from tpucache.loading.columns import Columns, fit_columns
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.order import make_sampled_order
from tpucache.recipe import differing_images, image_settings
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS
from tpucache.store.manifest import differ_in_values, label_options, mask_difference
from tpucache.training.defaults import decide_length, decide_precision, expect_least_share
from tpucache.training.device import Device
from tpucache.training.forward import image_channels
from tpucache.training.settings import TrainSettings, in_size, own_size
from tpucache.training.tasks.find import find_task
from tpucache.training.tasks.task import Task

_log: Final = logging.getLogger("tpucache")

#: Fields with positions in an image. The augmentation on the device moves pixels and masks, but not these positions.
_POINTS: Final = (BOXES, KEYPOINTS)


@dataclass(frozen=True)
class RunData:
    """The training samples of a run, its validation samples, and the task that it learns.

    In both sets, a sample includes the `columns` of the samples table that are inputs of the model, and images have the
    size of the evaluation. If the cache has soft labels, the training samples have soft labels in place of labels.
    """

    task: Task
    train_set: CachedDataset
    valid_set: CachedDataset | None
    columns: Columns

    @property
    def channels(self) -> int:
        return image_channels(self.train_set)

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.task.class_names(self.train_set.classes)

    @property
    def is_finished(self) -> bool:
        return self.train_set.is_finished and (self.valid_set is None or self.valid_set.is_finished)

    @property
    def digests(self) -> dict[str, str | None]:
        valid = self.valid_set
        return {"training": self.train_set.digest, "validation": None if valid is None else valid.digest}


def prepare_data(
    settings: TrainSettings, train_set: CachedDataset, valid_set: CachedDataset | None, device: Device
) -> RunData:
    task = choose_task(settings, train_set)
    check_fit(settings, task, train_set, valid_set, device)
    train_set = soft_labelled(settings, task, train_set)
    columns = fit_columns(settings.inputs, train_set.table, train_set.positions)

    def as_seen(dataset: CachedDataset) -> CachedDataset:
        if columns.parts:
            dataset = dataset.with_columns(columns.encode(dataset.table, dataset.positions))
        return in_size(dataset, settings.sizes.valid)

    return RunData(task, as_seen(train_set), None if valid_set is None else as_seen(valid_set), columns)


def begin(settings: TrainSettings, dataset: CachedDataset, device: Device, samples: int | None = None) -> TrainSettings:
    """Return the settings with an image size for training, a number of epochs and a batch size; given ones are kept.

    `samples` is the number of training samples, that of the dataset if it is None.
    """
    settings = with_own_size(settings, dataset)
    samples = len(dataset) if samples is None else samples
    least = expect_least_share(settings, choose_task(settings, dataset), dataset, samples)
    return decide_length(settings, samples, device.cores, device.processes.world_size, least)


def with_own_size(settings: TrainSettings, dataset: CachedDataset) -> TrainSettings:
    """Return the settings with an image size for training.

    If the settings give `valid_size` but neither `size` nor `grow`, `size` becomes the side of the dataset's images;
    otherwise the settings are not changed.
    """
    if settings.valid_size is None or settings.size is not None or settings.grow is not None:
        return settings
    return replace(settings, size=own_size(dataset)) if image_channels(dataset) else settings


def choose_task(settings: TrainSettings, dataset: CachedDataset) -> Task:
    task = find_task(settings.task, dataset, settings.mask_classes)
    return task if settings.own_loss else task.with_loss(settings.loss)


def soft_labelled(settings: TrainSettings, task: Task, train_set: CachedDataset) -> CachedDataset:
    soft = train_set.with_soft_labels()
    if soft is train_set:
        return train_set
    own = [name for name in (settings.loss, settings.train_step) if name not in (None, "cross-entropy")]
    if task.name != "classes" or own:
        what = f"the task {task.name!r}" if task.name != "classes" else str(own[0])
        raise UsageError(
            f"{train_set.directory} has soft labels with weights, which {what} cannot learn: train on classes by "
            "cross-entropy, or relabel the cache with --label-col"
        )
    return soft


def check_fit(
    settings: TrainSettings, task: Task, train_set: CachedDataset, valid_set: CachedDataset | None, device: Device
) -> None:
    """Raise UsageError unless settings, data and device fit together.

    The training samples must fill one execution, and a batch must divide evenly over the cores.
    """
    decide_precision(settings, device)
    for name, dataset in (("training", train_set), ("validation", valid_set)):
        if dataset is None:
            continue
        if not len(dataset):
            raise UsageError(f"there are no {name} samples: give a cache or a selection that has samples")
        try:
            task.check_dataset(dataset, is_learned=dataset is train_set)
        except UsageError as error:
            raise UsageError(f"{name} data: {error}") from error
    if valid_set is not None:
        _check_validation(task, train_set, valid_set)
        if device.processes.is_main:
            _warn_of_images(train_set, valid_set)
    _check_combination(settings, train_set)
    if settings.own_loss and valid_set is not None and device.name == "xla" and device.processes.world_size > 1:
        raise UsageError(
            f"--loss {settings.loss} returns one number for a batch, and each host of a pod evaluates only its own "
            "rows of a batch: leave --valid out, or train on one host"
        )
    _check_watching(settings, task, valid_set)
    batch, part = settings.batch, settings.part_size
    if len(train_set) < batch * settings.steps_per_execution:
        raise UsageError(
            f"{len(train_set)} training samples do not make one execution of {settings.steps_per_execution} x {batch} "
            "samples (--steps-per-execution x --batch-size): give a smaller value of one of the two"
        )
    processes = device.processes.world_size
    if part % (device.cores * processes):
        share = device.cores * processes * settings.accumulate
        over = f"{processes} processes" if processes > 1 else f"{device.cores} cores"
        raise UsageError(
            f"a batch of {batch} does not divide over {over} in {settings.accumulate} parts: "
            f"give --batch-size {-(-batch // share) * share}"
        )


def _check_validation(task: Task, train_set: CachedDataset, valid_set: CachedDataset) -> None:
    if valid_set.classes != train_set.classes:
        raise UsageError(
            f"the validation cache has the classes {', '.join(valid_set.classes)}, "
            f"the training cache {', '.join(train_set.classes)}: both must have the same classes in the same order. "
            f"{_advice(train_set)}"
        )
    learned, found = train_set.manifest.value_names, valid_set.manifest.value_names
    if task.form == "values" and differ_in_values(learned, found):
        raise UsageError(
            f"the labels of the validation cache are the columns {', '.join(found)}, those of the training cache "
            f"{', '.join(learned)}: both must have the same columns in the same order. Relabel the validation cache "
            f"with {label_options(learned)}"
        )
    if task.form == "maps" and (difference := mask_difference(train_set.manifest, valid_set.manifest)):
        raise UsageError(
            f"the masks of the validation cache have other classes than those of the training cache: {difference}"
        )
    if _shapes(valid_set) != _shapes(train_set):
        raise UsageError(
            f"the validation cache's records have other fields or sizes than the training cache's. {_advice(train_set)}"
        )


def _warn_of_images(train_set: CachedDataset, valid_set: CachedDataset) -> None:
    before, now = differing_images(image_settings(train_set.manifest), image_settings(valid_set.manifest))
    if before:
        _log.warning(
            "the validation images were made with %s, the training images with %s, so metrics may be worse than the "
            "model. %s", now, before, _advice(train_set),
        )  # fmt: skip


def _advice(train_set: CachedDataset) -> str:
    return f"Build the validation cache with `warmup SOURCE CACHE --like {train_set.directory}`"


def _check_combination(settings: TrainSettings, train_set: CachedDataset) -> None:
    own = f"--train-step {settings.train_step}" if settings.train_step else f"--loss {settings.loss}"
    if settings.balance:
        make_sampled_order(train_set, balance=True)
    if settings.loss and settings.train_step:
        raise UsageError(f"--loss {settings.loss} would not be used: {own} computes the loss. Leave one of them out")
    if settings.inputs and settings.augment.mixes:
        raise UsageError(
            "mixup and cutmix mix images, not the columns of --inputs: leave --inputs out, or both of them"
        )
    points = [name for name in _POINTS if name in train_set.names]
    if settings.train_step and settings.augment.moves and points and IMAGE in train_set.names:
        raise UsageError(
            f"augmentation on the device moves images and masks, not {' and '.join(points)}: with {own} leave "
            "--flip, --crop and what moves in --augment out, or make these changes in warmup's variants"
        )


def _check_watching(settings: TrainSettings, task: Task, valid_set: CachedDataset | None) -> None:
    wanted = {"metric": settings.metric, "watch": settings.watch, "patience": settings.patience}
    given = [f"--{name}" for name, value in wanted.items() if value]
    if given and valid_set is None:
        raise UsageError(f"{given[0]} needs validation samples, and there are none: add --valid")
    if settings.metric and task.form != "values":
        raise UsageError(
            f"--metric needs a row of predictions for each sample, and the task {task.name!r} predicts a map for each "
            "sample: leave --metric out, and compute the metric from what `predict` writes"
        )


def _shapes(dataset: CachedDataset) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(field.name, field.dtype, field.shape) for field in dataset.manifest.fields]
