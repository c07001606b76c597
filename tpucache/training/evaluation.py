"""Predictions and metrics over a whole dataset, exact for any size of the last batch."""

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
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.loader import CachedLoader, Uncounted
from tpucache.ondevice.resident import Resident, as_named
from tpucache.progress import Progress
from tpucache.store.fields import IMAGE
from tpucache.training.device import Device
from tpucache.training.device.base import MOST_AHEAD
from tpucache.training.device.processes import Processes
from tpucache.training.device.tensors import DeviceBatch
from tpucache.training.feed.feeder import Feeder
from tpucache.training.learn.forward import make_finish
from tpucache.training.learn.learner import Learner
from tpucache.training.learn.user_code import compute_metrics
from tpucache.types import Array

#: Turns a batch's outputs and labels into tensors with one row for each sample, on the device.
Reduce = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]

#: Returns what keeps the records of an evaluation's loader on the device; None where they are sent each time.
Keep = Callable[[CachedLoader], Resident | None]

_SHOWN: Final = 12  # maps kept from an evaluation


def _keeps_nothing(_: CachedLoader) -> None:
    """Have the records of an evaluation sent each time."""


def evaluate(learner: Learner, dataset: CachedDataset, check: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Return `samples`, the mean `loss` over them, and the metrics of the task and of the user.

    The averaged weights are evaluated where there are any. The host adds up in float64: results do not depend on the
    batch size, or on the number of cores or processes. `check` is called between batches; if it raises, the evaluation
    ends, and the learner is as it was.

    Raises TrainingError when the loss is not finite.
    """
    scores = score(learner, dataset, check)
    return measure(learner, dataset, scores)


@dataclass(frozen=True)
class Scores:
    """Each sample's loss and error, and what the metrics are computed from: predictions, or counts.

    `maps` are the predicted maps of classes, uint8 (height, width), of the samples with the largest errors, by the
    samples' positions in the dataset; there are none where predictions are values.
    """

    losses: Array
    errors: Array
    values: Array
    maps: Mapping[int, Array]


def score(
    learner: Learner, dataset: CachedDataset, check: Callable[[], None] = lambda: None, keep: Keep = _keeps_nothing
) -> Scores:
    """Return losses and scores of all samples, on the host; see `evaluate`.

    Each process evaluates its share of the samples. The main process has the scores of all, the others have none.
    `keep` may have the samples stay on the device.
    """
    processes, task, part_size = learner.device.processes, learner.task, learner.part_size
    dataset, share = _own_share(dataset, processes)
    rows, labels = share.stop - share.start, dataset.labels.numpy()
    losses, errors, values = [], [], []
    maps: list[tuple[float, int, Array]] = []
    done = 0
    with (
        # Closed at once when `check` raises: the model has the averaged weights until then.
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
                maps = heapq.nlargest(_SHOWN, [*maps, *more], key=operator.itemgetter(0))
            done += len(part)
            progress.advance(len(part))
            check()
        for _ in range(-(-len(dataset) // part_size) - len(losses)):
            check()  # as often in all processes
    gathered = [_joined(processes.gather(part)) for part in (losses, errors, values)]
    all_maps = itertools.chain.from_iterable(processes.gather(maps))
    kept = {position: of for _, position, of in heapq.nlargest(_SHOWN, all_maps, key=operator.itemgetter(0))}
    return Scores(gathered[0], gathered[1], gathered[2], kept)


def measure(learner: Learner, dataset: CachedDataset, scores: Scores) -> dict[str, float]:
    """Return, on all processes, the metrics of the scores that the main process has; see `evaluate`."""
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
    """Return the arrays of each process one after another; an empty one where there are none."""
    arrays = [*itertools.chain.from_iterable(parts)]
    return np.concatenate(arrays) if arrays else np.empty(0)


def compile_evaluation(learner: Learner, dataset: CachedDataset | None, keep: Keep = _keeps_nothing) -> None:
    """Evaluate a few samples: all graphs compile, and errors in them are raised, now and not after an epoch.

    One sample is enough, unless a loss of the user's takes the real samples of the last batch. Where `keep` has samples
    stay on the device, the last batch is evaluated, and for such a loss the batch before it as well.
    """
    if dataset is None:
        return
    if keep is _keeps_nothing:
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
    keep: Keep = _keeps_nothing,
    first: int = 0,
) -> Generator[tuple[Array, ...], None, None]:
    """Yield the result of `reduce` on the learner's outputs and the labels of each batch; see `compute_rows`."""

    def compute(batch: DeviceBatch) -> tuple[torch.Tensor, ...]:
        return reduce(learner.predict(batch), learner.labels(batch))

    dataset = learner.task.as_learned(dataset)
    with learner.evaluated() as model:
        learner.device.processes.share_buffers(
            model.buffers()
        )  # each process has had its own running statistics until now
        threads, size = learner.settings.threads, learner.part_size
        yield from compute_rows(dataset, learner.device, size, threads, compute, rows, keep, first)


def compute_rows(
    dataset: CachedDataset,
    device: Device,
    batch_size: int,
    threads: int,
    compute: Callable[[DeviceBatch], tuple[torch.Tensor, ...]],
    rows: int | None = None,
    keep: Keep = _keeps_nothing,
    first: int = 0,
) -> Generator[tuple[Array, ...], None, None]:
    """Yield the results of `compute` for each batch as arrays, in the order of the samples and without padding.

    The last batch is padded on the device, so that all batches share one graph. `rows` samples from `first` on are
    given, if it is not None; what is computed beyond them is left out.
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
    """Yield batches of results of `compute`, each with the position of its first sample; see `compute_rows`.

    Each process computes its share of the samples, in batches of its share of `batch_size`. The main one gets a list
    of the results of all processes, the others an empty list as often. `check` is called after each batch.
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
    """Return the samples that a process evaluates, and the positions of those that count, which come first.

    All processes evaluate the same number, so that all run the same programs: some repeat a sample at the end.
    """
    share, most = processes.share(len(dataset)), -(-len(dataset) // processes.world_size)
    if processes.world_size == 1:
        return dataset, share
    own = [*range(len(dataset))[share]]
    return dataset.select([*own, *[len(dataset) - 1] * (most - len(own))]), share


def _score(learner: Learner, samples: int) -> Reduce:
    """Return the function that gives each sample's loss, the scores for its metrics, and its map of classes if any."""
    rows = iter(_batch_rows(samples, learner.part_size))

    def reduce(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        maps = (outputs.argmax(1).to(torch.uint8),) if learner.task.form == "maps" else ()
        count = next(rows, len(outputs))  # rows beyond the samples are left out
        return learner.losses(outputs, labels, count), learner.task.scores(outputs, labels), *maps

    return reduce


def _batch_rows(samples: int, batch_size: int) -> list[int]:
    """Return how many samples each batch has."""
    return [min(batch_size, samples - first) for first in range(0, samples, batch_size)]


def pad_last(batches: Iterable[Any], batch_size: int) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield batches as dicts, a short one filled up to `batch_size` with zeros; label 0 is a label like any other."""
    for batch in batches:
        yield {name: _pad(tensor, batch_size, name == IMAGE) for name, tensor in as_named(batch).items()}


def pad_rows(batches: Generator[Uncounted, None, None], batch_size: int) -> Generator[Any, None, None]:
    """Yield batches of rows on the device, a short one filled up to `batch_size` with its own."""
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
