"""Decides how many epochs a time limit allows: before the first epoch, a few steps and evaluation batches are timed."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Final

from tpucache.errors import UsageError
from tpucache.progress import note
from tpucache.text import duration_text
from tpucache.training.data import RunData
from tpucache.training.defaults import Custom, decide_settings
from tpucache.training.device import Device
from tpucache.training.evaluation import score
from tpucache.training.feed import Feeder, drawer, parts
from tpucache.training.interrupt import StopRequest
from tpucache.training.learner import Learner, preserved
from tpucache.training.schedule import constant
from tpucache.training.settings import TrainSettings
from tpucache.training.weights import InitialWeights

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
    """Return a new run's settings with as many epochs as its time limit allows, at least one."""
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
