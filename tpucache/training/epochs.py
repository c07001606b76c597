"""How many epochs a time limit allows: a few steps and evaluation batches are timed before the first epoch."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Final

from tpucache.errors import UsageError
from tpucache.progress import note
from tpucache.training.data import RunData
from tpucache.training.device import Device
from tpucache.training.evaluation import score
from tpucache.training.feed.feeder import Feeder, drawer, parts
from tpucache.training.interrupt import StopRequest
from tpucache.training.learn.defaults import Custom, decide_settings
from tpucache.training.learn.learner import Learner, preserved
from tpucache.training.learn.schedule import constant
from tpucache.training.run.weights import InitialWeights
from tpucache.training.settings import TrainSettings
from tpucache.units import duration_text

_PROBE_SHARE: Final = 0.05  # at most this share of the time left goes into timing steps
_WARM: Final = 2  # steps that also compile
_LEAST: Final = 3  # steps that are timed
_USED: Final = 0.95  # share of the time left that is planned: a pace varies
_EVALUATED: Final = 4  # batches of the evaluation


def decide_epochs(
    begun: InitialWeights,
    data: RunData,
    device: Device,
    custom: Custom | None,
    stop: StopRequest,
    runs: int = 1,
) -> TrainSettings:
    """Return the settings of a new run with as many epochs as the time that is left allows, at least one.

    `runs` of the same length share that time. A learner of its own takes the steps that are timed, on images of the
    largest size; all random numbers are afterwards what they were. Raises UsageError without a time limit, and
    UnfinishedError when it is over meanwhile.
    """
    settings = begun.settings
    left = stop.seconds_left
    if left is None:
        raise UsageError("--epochs auto are those that --time-limit allows: give that, too, or a number of epochs")
    largest = max((size for size in settings.sizes.epochs if size is not None), default=None)
    probe = replace(settings, epochs=1, size=largest, grow=None, fix_res=0, valid_size=settings.sizes.valid)
    decided = decide_settings(probe, data.train_set, data.task, device, custom)
    learner = Learner(decided, data.train_set, data.task, device, begun.weights)
    with preserved(learner), device.fast_products():
        step = _step_seconds(learner, data, _PROBE_SHARE * left / runs, stop)
        evaluation = _evaluation_seconds(learner, data, stop)
    each = device.processes.largest(step * learner.settings.steps_per_epoch(len(data.train_set)) + evaluation)
    left = device.processes.on_main(lambda: stop.seconds_left or 0.0) / runs
    epochs = max(1, int(_USED * left / max(each, 1e-9)))
    late = "" if each <= left else ": fewer than one, so that the time limit stops it, and --resume continues"
    if device.processes.is_main:
        note(
            f"train: {epochs} epoch{'s' * (epochs > 1)}, as one takes about {duration_text(each)} and "
            f"{duration_text(left)} are left{late}"
        )
    return replace(settings, epochs=epochs)


def _step_seconds(learner: Learner, data: RunData, budget: float, stop: StopRequest) -> float:
    """Return the seconds of a step with its data, the mean over as many as the budget allows, at most an epoch's."""
    settings, device, processes = learner.settings, learner.device, learner.device.processes
    train_set = learner.task.as_learned(data.train_set)
    batches = parts(settings, train_set, pin_memory=device.pin_memory, processes=processes)
    most = _WARM + max(_LEAST, settings.steps_per_epoch(len(data.train_set)))
    began, done = time.monotonic(), 0
    with Feeder(batches, device, draw=drawer(settings, data.train_set, processes)) as feeder:
        stream = iter(feeder)
        for number in range(most):
            stop.check("while the pace is measured")
            if number == _WARM:
                device.wait()
                began = time.monotonic()
            learner.step(list(itertools.islice(stream, settings.accumulate)), constant(0, 1, 1e-6), number)
            device.step_end()
            device.wait()
            done = number + 1 - _WARM
            if processes.largest(done >= _LEAST and time.monotonic() - began > budget):
                break
    return (time.monotonic() - began) / max(done, 1)


def _evaluation_seconds(learner: Learner, data: RunData, stop: StopRequest) -> float:
    """Return the seconds of an evaluation, scaled from its first batches."""
    if data.valid_set is None:
        return 0.0
    samples = min(len(data.valid_set), _EVALUATED * learner.settings.part_size)
    began = 0.0
    for _ in range(2):  # the first one compiles
        began = time.monotonic()
        score(learner, data.valid_set.select(range(samples)), lambda: stop.check("while the pace is measured"))
    return (time.monotonic() - began) * len(data.valid_set) / samples
