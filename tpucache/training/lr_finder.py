"""What steps before the first epoch find: the learning rate, and the number of epochs that a time limit allows.

In the learning-rate range test the rate rises until the loss diverges; the steepest fall of the loss gives the rate.

L. Smith, "Cyclical Learning Rates for Training Neural Networks", arXiv:1506.01186.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from tpucache.errors import TrainingError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.progress import Progress, note
from tpucache.runs import LAST_NAME, RANGE_TEST_CSV_NAME, RANGE_TEST_NAME
from tpucache.text import duration_text
from tpucache.training.data import RunData, begin, prepare_data
from tpucache.training.defaults import Custom, decide_settings
from tpucache.training.device import Device, Processes
from tpucache.training.evaluation import score
from tpucache.training.feed import Feeder, drawer, parts
from tpucache.training.interrupt import StopRequest
from tpucache.training.learner import Learner, preserved
from tpucache.training.run.files import continued_settings, hold_run
from tpucache.training.schedule import constant
from tpucache.training.settings import TrainSettings
from tpucache.training.watch import RangeTest, save_range_test, smooth
from tpucache.training.weights import InitialWeights, initial_weights, write_result

_LAG: Final = 16  # a loss is read this many steps later, as in a run
_DECAY: Final = 0.9
_DIVERGED: Final = 4.0  # the loss has diverged above this many times the smallest loss, as in fastai
_FALL: Final = 0.01  # the loss has to fall by this share over a decade of rates, at least


def find_lr(
    run: str | Path,
    settings: TrainSettings,
    train_set: CachedDataset,
    device: Device,
    resume: bool = False,
    stop: StopRequest | None = None,
) -> TrainSettings:
    """Return the settings with the learning rate that a range test suggests; write the test's result to `run`.

    A resumed run keeps its rate. Raises UsageError when data, settings and device do not fit together, or the folder
    has a run that must not be resumed; TrainingError when the loss falls at none of the rates; UnfinishedError when a
    time limit is reached: then the test has to be repeated.
    """
    run, processes = Path(run), device.processes
    with hold_run(run, processes):
        known = processes.on_main(lambda: _known_settings(run, settings, resume))
        if known is not None:
            return known
        settings = begin(settings, train_set, device)
        data = prepare_data(settings, train_set, None, device)
        begun = processes.on_main(
            lambda: initial_weights(run, settings, data.channels, data.class_names, data.train_set.manifest)
        )
        learner = Learner(begun.settings, data.train_set, data.task, device, begun.weights)
        found = range_test(learner, data.train_set, stop=stop)
        processes.on_main(lambda: _write(run, found))
    settings = replace(settings, optimizer=learner.settings.optimizer, clip=learner.settings.clip)
    return replace(settings, lr=found.suggestion)


def _known_settings(run: Path, settings: TrainSettings, resume: bool) -> TrainSettings | None:
    """Return `settings` completed by those of the run in the folder `run`; None if the run has no checkpoint yet."""
    if not (run / LAST_NAME).exists():
        return None
    if not resume:
        raise UsageError(f"{run} already contains a run: add --resume to continue it, or give another folder")
    return continued_settings(run, settings, resume)


def range_test(
    learner: Learner,
    train_set: CachedDataset,
    lowest: float = 1e-6,
    highest: float = 10.0,
    steps: int = 100,
    stop: StopRequest | None = None,
) -> RangeTest:
    if not 0 < lowest < highest < math.inf or steps < 2:
        raise UsageError(
            f"the learning rate must rise from a number above 0 to a larger, finite one in at least 2 steps, not from "
            f"{lowest} to {highest} in {steps}: give other rates"
        )
    rates = [lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(steps)]
    with preserved(learner), learner.device.fast_products():
        losses = _losses(learner, train_set, rates, stop or StopRequest())
    smoothed = smooth(losses, _DECAY)
    rates = rates[: len(losses)]
    return RangeTest(rates, losses, smoothed, suggest(rates, smoothed))


def suggest(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Return the middle of the decade with the steepest fitted line: two neighbouring steps are mostly noise."""
    least = int(np.argmin(losses)) + 1 if len(losses) else 0
    decade = min(least, round((len(rates) - 1) / math.log10(rates[-1] / rates[0]))) if least > 2 else 0
    if decade > 2:
        scale = np.log10(rates)
        windows = [slice(start, start + decade) for start in range(least - decade + 1)]
        falls = [-np.polyfit(scale[window], losses[window], 1)[0] for window in windows]
        steepest = int(np.argmax(falls))
        if falls[steepest] >= _FALL * abs(losses[steepest]):
            return rates[steepest + decade // 2]
    raise TrainingError(
        "the loss falls at none of the rates that were tried: give --lr a number, and check that model and labels fit"
    )


def _losses(learner: Learner, train_set: CachedDataset, rates: Sequence[float], stop: StopRequest) -> list[float]:
    settings, device, processes = learner.settings, learner.device, learner.device.processes
    # The losses are compared, so all steps have the image size of the first epoch.
    settings = replace(settings, size=settings.sizes.at(0), grow=None)
    stop.share(processes.largest_before())
    batches = parts(settings, learner.task.as_learned(train_set), pin_memory=device.pin_memory, processes=processes)
    pending: deque[Callable[[], torch.Tensor]] = deque()
    losses: list[float] = []
    with (
        Feeder(batches, device, draw=drawer(settings, train_set, processes)) as feeder,
        Progress(len(rates), "find rate", "steps") as progress,
    ):
        stream = iter(feeder)
        for number, rate in enumerate(rates):
            stop.check(f"in the range test of the learning rate, after {number} of {len(rates)} steps")
            batch = list(itertools.islice(stream, settings.accumulate))
            pending.append(device.fetch(learner.step(batch, constant(rate), number)))
            device.step_end()
            progress.advance(1)
            if len(pending) > _LAG and not _read(losses, pending.popleft(), processes):
                return losses
        while pending and _read(losses, pending.popleft(), processes):
            continue
    return losses


def _read(losses: list[float], fetched: Callable[[], torch.Tensor], processes: Processes) -> bool:
    (value,) = processes.mean([float(fetched())])
    if not math.isfinite(value):
        return False
    losses.append(value)
    smoothed = smooth(losses, _DECAY)
    return smoothed[-1] <= _DIVERGED * min(smoothed)


def _write(run: Path, found: RangeTest) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["lr", "loss", "smoothed"])
    writer.writerows(zip(found.rates, found.losses, found.smoothed, strict=True))
    write_result(run / RANGE_TEST_CSV_NAME, text.getvalue().encode())
    save_range_test(run / RANGE_TEST_NAME, found)


_PROBE_SHARE: Final = 0.05  # steps are timed for this share of the time left, at most
_COMPILING_STEPS: Final = 2
_FEWEST_STEPS: Final = 3  # steps that are timed, at least
_PLANNED_SHARE: Final = 0.95  # epochs are planned for this share of the time left: the pace varies
_EVALUATED_BATCHES: Final = 4


def decide_epochs(
    begun: InitialWeights,
    data: RunData,
    device: Device,
    custom: Custom | None,
    stop: StopRequest,
    runs: int = 1,
) -> TrainSettings:
    settings = begun.settings
    left = stop.seconds_left
    if left is None:
        raise UsageError("--epochs auto needs a time limit: give --time-limit, too, or a number of epochs")
    largest = max((size for size in settings.sizes.epochs if size is not None), default=None)
    probe = replace(settings, epochs=1, size=largest, grow=None, valid_size=settings.sizes.valid)
    decided = decide_settings(probe, data.train_set, data.task, device, custom)
    learner = Learner(decided, data.train_set, data.task, device, begun.weights)
    with preserved(learner), device.fast_products():
        step = _step_seconds(learner, data, _PROBE_SHARE * left / runs, stop)
        evaluation = _evaluation_seconds(learner, data, stop)
    each = device.processes.largest(step * learner.settings.steps_per_epoch(len(data.train_set)) + evaluation)
    left = device.processes.on_main(lambda: stop.seconds_left or 0.0) / runs
    epochs = max(1, int(_PLANNED_SHARE * left / max(each, 1e-9)))
    late = "" if each <= left else ", not even one epoch: the time limit will stop the run, and --resume continues it"
    if device.processes.is_main:
        note(
            f"train: {epochs} epoch{'s' * (epochs > 1)}, as an epoch takes about {duration_text(each)} and "
            f"{duration_text(left)} are left{late}"
        )
    return replace(settings, epochs=epochs)


def _step_seconds(learner: Learner, data: RunData, budget: float, stop: StopRequest) -> float:
    settings, device, processes = learner.settings, learner.device, learner.device.processes
    train_set = learner.task.as_learned(data.train_set)
    batches = parts(settings, train_set, pin_memory=device.pin_memory, processes=processes)
    most = _COMPILING_STEPS + max(_FEWEST_STEPS, settings.steps_per_epoch(len(data.train_set)))
    began, done = time.monotonic(), 0
    with Feeder(batches, device, draw=drawer(settings, data.train_set, processes)) as feeder:
        stream = iter(feeder)
        for number in range(most):
            stop.check("while the pace is measured")
            if number == _COMPILING_STEPS:
                device.wait()
                began = time.monotonic()
            learner.step(list(itertools.islice(stream, settings.accumulate)), constant(1e-6), number)
            device.step_end()
            device.wait()
            done = number + 1 - _COMPILING_STEPS
            if processes.largest(done >= _FEWEST_STEPS and time.monotonic() - began > budget):
                break
    return (time.monotonic() - began) / max(done, 1)


def _evaluation_seconds(learner: Learner, data: RunData, stop: StopRequest) -> float:
    if data.valid_set is None:
        return 0.0
    samples = min(len(data.valid_set), _EVALUATED_BATCHES * learner.settings.part_size)
    began = 0.0
    for _ in range(2):  # the first one compiles
        began = time.monotonic()
        score(learner, data.valid_set.select(range(samples)), lambda: stop.check("while the pace is measured"))
    return (time.monotonic() - began) * len(data.valid_set) / samples
