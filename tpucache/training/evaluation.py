"""Predictions and metrics over a whole dataset; the padding of the last batch does not count."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from tpucache.errors import TrainingError
from tpucache.loading.ahead import Uncounted
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader
from tpucache.native import Array
from tpucache.ondevice.resident import Resident, as_named
from tpucache.progress import Progress
from tpucache.store.fields import IMAGE
from tpucache.training.device import Device
from tpucache.training.device.base import MOST_AHEAD, DeviceBatch, Processes
from tpucache.training.feed import Feeder
from tpucache.training.forward import make_finish
from tpucache.training.learner import Learner
from tpucache.training.user_code import compute_metrics

#: Turns a batch's outputs and labels into tensors with one row for each sample, on the device.
Reduce = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]

#: Returns the Resident that keeps a loader's records in the device's memory, or None if each evaluation uploads them.
Keep = Callable[[CachedLoader], Resident | None]

_KEPT_MAPS: Final = 12  # predicted class maps that an evaluation keeps: those with the largest errors


def keep_nothing(_: CachedLoader) -> None:
    """Keep no records on the device: each evaluation uploads them."""


def evaluate(learner: Learner, dataset: CachedDataset, check: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Return the number of `samples`, their mean `loss`, and the metrics of the task and of the user.

    Averaged weights are evaluated if there are any. The host adds up in float64, so the results do not depend on the
    batch size or on the number of cores or processes. `check` may raise between batches; the learner is then unchanged.
    Raises TrainingError when the loss is not finite, or the model fails.
    """
    scores = score(learner, dataset, check)
    return measure(learner, dataset, scores)


@dataclass(frozen=True)
class Scores:
    """The scores of all samples of an evaluation.

    `losses` and `errors` have a number for each sample. `values` are what the metrics are computed from: predictions or
    counts. `maps` has the predicted class maps of the samples with the largest errors: uint8 (height, width), by the
    position of the sample in the dataset. `maps` is empty if the task does not predict maps.
    """

    losses: Array
    errors: Array
    values: Array
    maps: Mapping[int, Array]


def score(
    learner: Learner, dataset: CachedDataset, check: Callable[[], None] = lambda: None, keep: Keep = keep_nothing
) -> Scores:
    processes, task, part_size = learner.device.processes, learner.task, learner.part_size
    dataset, share = _own_share(dataset, processes)
    rows, labels = share.stop - share.start, dataset.labels.numpy()
    losses, errors, values = [], [], []
    maps: list[tuple[float, int, Array]] = []
    done = 0
    with (
        # If `check` raises, closing gives the model its own weights back in place of the averaged ones.
        contextlib.closing(results(learner, dataset, _score(learner, rows), rows, keep)) as batches,
        Progress(rows, "evaluate", "images", is_brief=True) as progress,
    ):
        for part, value, *shown in batches:
            losses.append(part)
            errors.append(np.nan_to_num(task.errors(value, labels[done : done + len(part)]), nan=np.inf))
            values.append(task.collect(value))
            for found in shown:
                first = share.start + done
                more = ((float(error), first + row, found[row]) for row, error in enumerate(errors[-1]))
                maps = heapq.nlargest(_KEPT_MAPS, [*maps, *more], key=operator.itemgetter(0))
            done += len(part)
            progress.advance(len(part))
            check()
        for _ in range(-(-len(dataset) // part_size) - len(losses)):
            check()  # all processes have to call it equally often
    gathered = [_joined(processes.gather(part)) for part in (losses, errors, values)]
    all_maps = itertools.chain.from_iterable(processes.gather(maps))
    worst = heapq.nlargest(_KEPT_MAPS, all_maps, key=operator.itemgetter(0))
    kept = {position: class_map for _, position, class_map in worst}
    return Scores(gathered[0], gathered[1], gathered[2], kept)


def measure(learner: Learner, dataset: CachedDataset, scores: Scores) -> dict[str, float]:
    """Return, on all processes, the metrics computed from the main process's scores; see `evaluate`."""
    return learner.device.processes.on_main(lambda: _measure(learner, dataset, scores))


def _measure(learner: Learner, dataset: CachedDataset, scores: Scores) -> dict[str, float]:
    loss = float(scores.losses.astype(np.float64).mean())
    if not math.isfinite(loss):
        raise TrainingError(
            f"the validation loss is {loss} {learner.position}: training has diverged. {learner.advice}"
        )
    labels = dataset.labels.numpy()
    own = compute_metrics(learner.metrics, scores.values, labels)
    return {"samples": len(dataset), "loss": loss, **learner.task.metrics(scores.values, labels), **own}


def _joined(parts: Sequence[Sequence[Array]]) -> Array:
    arrays = [*itertools.chain.from_iterable(parts)]
    return np.concatenate(arrays) if arrays else np.empty(0)


def compile_evaluation(learner: Learner, dataset: CachedDataset | None, keep: Keep = keep_nothing) -> None:
    """Evaluate a few samples now: a full and a shorter batch for a loss of the user, which gets no padding."""
    if dataset is None:
        return
    if keep is keep_nothing:
        batch = learner.part_size
        rows = 1 if learner.settings.own_loss is None else min(len(dataset), batch + len(dataset) % batch)
        for _ in results(learner, dataset.select(range(rows)), _score(learner, rows)):
            pass
        return
    own, _ = _own_share(dataset, learner.device.processes)
    batch = learner.part_size
    count = len(own) % batch or min(len(own), batch)
    if learner.settings.own_loss is not None and count < batch:
        count = min(len(own), batch + count)
    for _ in results(learner, own, _score(learner, count), count, keep, len(own) - count):
        pass


def results(
    learner: Learner,
    dataset: CachedDataset,
    reduce: Reduce,
    rows: int | None = None,
    keep: Keep = keep_nothing,
    first: int = 0,
) -> Generator[tuple[Array, ...], None, None]:

    def compute(batch: DeviceBatch) -> tuple[torch.Tensor, ...]:
        return reduce(learner.predict(batch), learner.labels(batch))

    dataset = learner.task.as_learned(dataset)
    with learner.evaluated() as model:
        # Each process has its own running statistics of batch normalisation: all take those of the main process.
        learner.device.processes.share_buffers(model.buffers())
        threads, size = learner.settings.threads, learner.part_size
        yield from compute_rows(dataset, learner.device, size, threads, compute, rows, keep, first)


def compute_rows(
    dataset: CachedDataset,
    device: Device,
    batch_size: int,
    threads: int,
    compute: Callable[[DeviceBatch], tuple[torch.Tensor, ...]],
    rows: int | None = None,
    keep: Keep = keep_nothing,
    first: int = 0,
) -> Generator[tuple[Array, ...], None, None]:
    """Yield the results of `compute` for each batch as arrays, in the samples' order and without padding.

    The last batch is padded, so that all batches share one graph. If `rows` is given, only that many samples from
    position `first` count. `keep` decides whether the records stay on the device.
    """
    loader = CachedLoader(dataset, batch_size, threads=threads, finish="device", pin_memory=device.pin_memory)
    if first:
        loader.load_state_dict({**loader.state_dict(), "position": first})
    finish, resident = make_finish(dataset, device), keep(loader)
    batches = pad_last(loader, batch_size) if resident is None else pad_rows(resident.pairs(loader), batch_size)
    counts = iter(_batch_rows(len(dataset) if rows is None else rows, batch_size))
    pending: deque[list[Callable[[], torch.Tensor]]] = deque()
    with device.fast_products(), torch.no_grad(), Feeder(batches, device, resident=resident) as feeder:
        for batch in feeder:
            pending.append([device.fetch_rows(tensor) for tensor in compute(finish(batch.gathered()))])
            device.step_end()
            if len(pending) > MOST_AHEAD:
                yield _to_host(pending.popleft(), next(counts))
        for count in counts:
            yield _to_host(pending.popleft(), count)


def shared_rows(
    dataset: CachedDataset,
    device: Device,
    batch_size: int,
    threads: int,
    compute: Callable[[DeviceBatch], tuple[torch.Tensor, ...]],
    check: Callable[[], None] = lambda: None,
) -> Generator[list[tuple[int, tuple[Array, ...]]], None, None]:
    """Yield the results of `compute` for each batch, with the position of the batch's first sample; see `compute_rows`.

    Each process computes its share. The main process gets lists of the results of all processes, the others empty
    lists.
    """
    processes = device.processes
    own, share = _own_share(dataset, processes)
    part_size, first, rows = batch_size // processes.world_size, share.start, share.stop - share.start
    with contextlib.closing(compute_rows(own, device, part_size, threads, compute, rows)) as batches:
        for _ in range(-(-len(own) // part_size)):
            part = next(batches, None)
            yield [found for found in processes.gather(None if part is None else (first, part)) if found is not None]
            first += 0 if part is None else len(part[0])
            check()


def _own_share(dataset: CachedDataset, processes: Processes) -> tuple[CachedDataset, slice]:
    """Return the samples that this process evaluates, and the slice of the dataset whose results count.

    All processes evaluate equally many samples, so that all run the same programs: the last sample is repeated.
    """
    share, most = processes.share(len(dataset)), -(-len(dataset) // processes.world_size)
    if processes.world_size == 1:
        return dataset, share
    own = [*range(len(dataset))[share]]
    return dataset.select([*own, *[len(dataset) - 1] * (most - len(own))]), share


def _score(learner: Learner, samples: int) -> Reduce:
    rows = iter(_batch_rows(samples, learner.part_size))

    def reduce(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        maps = (outputs.argmax(1).to(torch.uint8),) if learner.task.form == "maps" else ()
        count = next(rows, len(outputs))  # the other rows are padding
        return learner.losses(outputs, labels, count), learner.task.scores(outputs, labels), *maps

    return reduce


def _batch_rows(samples: int, batch_size: int) -> list[int]:
    return [min(batch_size, samples - first) for first in range(0, samples, batch_size)]


def pad_last(batches: Iterable[Any], batch_size: int) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield batches as dicts; fill a short batch up to `batch_size` with zeros, which are valid labels."""
    for batch in batches:
        yield {name: _pad(tensor, batch_size, name == IMAGE) for name, tensor in as_named(batch).items()}


def pad_rows(batches: Generator[Uncounted, None, None], batch_size: int) -> Generator[Any, None, None]:
    with contextlib.closing(batches):
        for (resident, read), _ in batches:
            full = {name: np.resize(getattr(read, name), batch_size) for name in ("slots", "numbers")}
            yield resident, read._replace(**full)


def _pad(tensor: torch.Tensor, rows: int, image: bool) -> torch.Tensor:
    if len(tensor) == rows:
        return tensor
    if image and tensor.ndim == 4:  # channels last in memory, as the batches before it
        return _pad(tensor.permute(0, 2, 3, 1), rows, False).permute(0, 3, 1, 2)
    padded = tensor.new_zeros((rows, *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    return padded


def _to_host(fetched: Iterable[Callable[[], torch.Tensor]], rows: int) -> tuple[Array, ...]:
    return tuple(tensor()[:rows].numpy() for tensor in fetched)
