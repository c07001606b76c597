"""The data of a run: its task, its columns, its soft labels and the size of its images, found once for each run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpucache.errors import NoRoomError, UsageError
from tpucache.loading.columns import Columns, fit_columns
from tpucache.loading.dataset import CachedDataset
from tpucache.training.check import check_fit
from tpucache.training.device import Device
from tpucache.training.learn.forward import image_channels
from tpucache.training.learn.tasks.find import find_task
from tpucache.training.learn.tasks.task import Task
from tpucache.training.settings import TrainSettings
from tpucache.training.sizes import in_size, own_size


@dataclass(frozen=True)
class RunData:
    """The training samples of a run, its validation samples, and the task that it learns.

    In both sets, a sample includes the `columns` of the samples table that are inputs of the model, and images have the
    size of the evaluation. The run's files describe the data in this form. If the cache has soft labels, the training
    samples have them in place of their labels.
    """

    task: Task
    train_set: CachedDataset
    valid_set: CachedDataset | None
    columns: Columns

    @property
    def channels(self) -> int:
        """The number of channels of the images; 0 if the records have no image."""
        return image_channels(self.train_set)

    @property
    def is_finished(self) -> bool:
        """Whether the caches are complete; `open_or_build` returns one that is still being built."""
        return self.train_set.is_finished and (self.valid_set is None or self.valid_set.is_finished)

    @property
    def digests(self) -> dict[str, str | None]:
        """The digests of the training set and of the validation set (None without one), by name.

        They are empty if a cache that is being built cannot be finished because the disk is full.
        """
        try:
            return {
                "training": self.train_set.digest,
                "validation": None if self.valid_set is None else self.valid_set.digest,
            }
        except NoRoomError:
            return {}

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the training cache; "" if it cannot be finished because the disk is full."""
        try:
            return self.train_set.manifest.fingerprint
        except NoRoomError:
            return ""


def prepare_data(
    settings: TrainSettings, train_set: CachedDataset, valid_set: CachedDataset | None, device: Device
) -> RunData:
    """Return the data of a run. `settings` must have a batch size, and a number of epochs or "auto".

    Raises UsageError where data, settings and device do not fit together.
    """
    task = choose_task(settings, train_set)
    check_fit(settings, task, train_set, valid_set, device)
    train_set = soft_labelled(settings, task, train_set)
    columns = fit_columns(settings.inputs, train_set.table, train_set.positions)

    def as_seen(dataset: CachedDataset) -> CachedDataset:
        if columns.parts:
            dataset = dataset.with_columns(columns.encode(dataset.table, dataset.positions))
        return in_size(dataset, settings.sizes.valid)

    return RunData(task, as_seen(train_set), None if valid_set is None else as_seen(valid_set), columns)


def with_own_size(settings: TrainSettings, dataset: CachedDataset) -> TrainSettings:
    """Return the settings. If they give only a size for the evaluation, `size` becomes the side of the dataset's
    images.

    Raises UsageError for images that are not square.
    """
    if settings.valid_size is None or settings.size is not None or settings.grow is not None:
        return settings
    return replace(settings, size=own_size(dataset)) if image_channels(dataset) else settings


def choose_task(settings: TrainSettings, dataset: CachedDataset) -> Task:
    """Return the task that the settings name, or else the one that fits the cache's labels. Raises UsageError."""
    task = find_task(settings.task, dataset, settings.mask_classes)
    return task if settings.own_loss else task.with_loss(settings.loss)


def soft_labelled(settings: TrainSettings, task: Task, train_set: CachedDataset) -> CachedDataset:
    """Return the training samples, with soft labels instead of labels where the cache has them. Raises UsageError."""
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
