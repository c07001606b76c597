"""The training loop, to be read once from top to bottom."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tpucache.errors import TrainingError, UnfinishedError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.progress import Progress
from tpucache.store.files import write_atomically
from tpucache.training.check import check_fit, find_task
from tpucache.training.course import Course, drawer
from tpucache.training.device import Device
from tpucache.training.feeder import Feeder
from tpucache.training.folder import Stand, open_run
from tpucache.training.history import Watcher
from tpucache.training.idle import PaceMeter, ceiling
from tpucache.training.interrupt import StopRequest, stop_on_signals
from tpucache.training.learner import Learner
from tpucache.training.report import REPORT_NAME, TrainReport, host_peak_bytes
from tpucache.training.settings import TrainSettings
from tpucache.training.tracing import Tracer

# What a time limit leaves for saving and for leaving.
_MARGIN_SHARE: Final = 0.1
_MARGIN_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Conduct:
    """How a run is carried out; none of it changes a number.

    `checkpoint_every` is in steps, beside the end of every epoch. `time_limit` is in seconds. `replay` measures, when
    training is done, how fast it could have been. `curves` leaves them as a picture, however the run ends. `profile` is
    the folder for a trace of a few executions after the warm-up, which are slower and count all the same.
    """

    resume: bool = False
    checkpoint_every: int | None = None
    time_limit: float | None = None
    replay: bool = True
    curves: bool = False
    profile: Path | None = None
    watchers: Sequence[Watcher] = ()

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise UsageError(f"checkpoint_every is at least 1 step, not {self.checkpoint_every}")


def train(
    run: Path,
    settings: TrainSettings,
    train_set: CachedDataset,
    valid_set: CachedDataset | None,
    device: Device,
    conduct: Conduct | None = None,
) -> TrainReport:
    """Train a model on a cache, evaluate it after each epoch, and leave checkpoints, a history and a report in `run`.

    A run that is resumed goes on where its last checkpoint stands, with the samples not yet seen, and ends in the same
    weights on the same backend.

    Raises UsageError when data, settings and device do not fit, TrainingError when the loss is not finite, and
    UnfinishedError when the time limit came first. SIGINT and SIGTERM end in a checkpoint and KeyboardInterrupt.
    Whatever the data raises in the middle of an epoch is raised here.
    """
    conduct = conduct or Conduct()
    deadline = None if conduct.time_limit is None else time.monotonic() + _usable(conduct.time_limit)
    task = find_task(settings, train_set)
    check_fit(settings, task, train_set, valid_set, device)
    opened = open_run(run, settings, train_set, conduct.resume)
    learner = Learner(settings, train_set, task, device)
    stand = Stand(0, [], [], None)
    if opened is not None:
        stand, state = opened
        learner.load_state_dict(state)
    course = Course(run, learner, train_set, valid_set, stand, conduct.watchers)
    course.compile_evaluation()  # what fails in it fails now
    total = course.steps * settings.batch_size
    with (
        stop_on_signals() as request,
        course.drawn(conduct.curves),
        Tracer(device, conduct.profile) as tracer,
        Feeder(
            course.parts(), device, draw=drawer(settings, train_set), first=stand.steps * settings.accumulate
        ) as feeder,
        Progress(total, "train", "images", stand.steps * settings.batch_size) as progress,
    ):
        # Averaged weights lie on the cores in another way once they have been averaged, which is another graph.
        meter = PaceMeter(device, feeder, warmed=course.compile_evaluation)
        parts = iter(feeder)
        while course.done < course.steps:
            meter.resume()
            for images in course.epoch(parts):
                meter.step(settings.steps_per_execution, images)
                tracer.step()
                progress.advance(images, f"{course.told()}, waited {meter.waited:.0%}")
                stops = _stops(request, deadline)
                if stops or course.due(conduct.checkpoint_every):
                    meter.pause()  # a sync point
                    course.save()
                    if stops:
                        raise _stopped(request, course, run)
                    meter.resume()
            meter.pause()  # a sync point
            course.end_epoch(meter.pace())
            if course.done < course.steps and _stops(request, deadline):
                raise _stopped(request, course, run)
        pace = meter.pace()
        if conduct.replay and pace.steps and not _stops(request, deadline):
            pace = pace.with_ceiling(ceiling(course.replay, device, images))
    report = TrainReport(
        device.name, device.cores, course.losses.values, course.rows, pace, host_peak_bytes(), device.peak_bytes()
    )
    _write(run / REPORT_NAME, report)
    return report


def _usable(time_limit: float) -> float:
    return time_limit - min(_MARGIN_SECONDS, _MARGIN_SHARE * time_limit)


def _stops(request: StopRequest, deadline: float | None) -> bool:
    return request.asked or (deadline is not None and time.monotonic() >= deadline)


def _stopped(request: StopRequest, course: Course, run: Path) -> BaseException:
    where = f"after step {course.done:,} of {course.steps:,}"
    if request.asked:
        return KeyboardInterrupt(f"interrupted {where}, and {run} has all of it: run again with --resume to go on")
    return UnfinishedError(f"the time is up {where}, and {run} has all of it: run again with --resume to go on")


def _write(path: Path, report: TrainReport) -> None:
    try:
        write_atomically(path, json.dumps(report.to_dict(), indent=1).encode())
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error}") from error
