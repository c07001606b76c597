"""Whether data, settings and device fit, told before the first step."""

from __future__ import annotations

from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.training.device import Device
from tpucache.training.learner import MASK, host_labels
from tpucache.training.settings import TrainSettings
from tpucache.training.tasks import Task, count_outputs, infer_task, make_task


def find_task(settings: TrainSettings, dataset: CachedDataset) -> Task:
    """Return the task that the settings name, or that the cache's labels are of. Raises UsageError."""
    name = infer_task(dataset) if settings.task == "auto" else settings.task
    if name != MASK:
        return make_task(name, count_outputs(name, dataset))
    if MASK not in dataset.names:
        raise UsageError("the cache has no masks: warm it up from a .csv with --mask-col")
    if settings.mask_classes is None:
        raise UsageError("a cache does not say how many classes its masks have: give --mask-classes")
    return make_task(name, settings.mask_classes)


def check_fit(
    settings: TrainSettings, task: Task, train_set: CachedDataset, valid_set: CachedDataset | None, device: Device
) -> None:
    """Raise UsageError when labels are not of the task, caches not of one kind, or a batch cannot be made."""
    for name, dataset in (("training", train_set), ("validation", valid_set)):
        if dataset is None:
            continue
        try:
            task.check(host_labels(task, dataset))
        except UsageError as error:
            raise UsageError(f"{name} data: {error}") from error
    if valid_set is not None and valid_set.classes != train_set.classes:
        raise UsageError(
            f"the validation cache has the classes {', '.join(valid_set.classes)}, "
            f"the training cache {', '.join(train_set.classes)}: they must be the same in the same order"
        )
    if valid_set is not None and _shapes(valid_set) != _shapes(train_set):
        raise UsageError("the validation cache's records have other fields or sizes than the training cache's")
    batch, part = settings.batch_size, settings.part_size
    if len(train_set) < batch * settings.steps_per_execution:
        raise UsageError(
            f"{len(train_set)} training samples do not make one execution of {settings.steps_per_execution} x {batch}: "
            "give a smaller --batch-size or --steps-per-execution"
        )
    if part % device.cores:
        share = device.cores * settings.accumulate
        raise UsageError(
            f"a batch of {batch} does not divide over {device.cores} cores in {settings.accumulate} parts: "
            f"give --batch-size {-(-batch // share) * share}"
        )


def _shapes(dataset: CachedDataset) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(field.name, field.dtype, field.shape) for field in dataset.manifest.fields]
