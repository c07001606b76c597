"""The training loop, written to be read from top to bottom."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tpucache.loading.dataset import CachedDataset
from tpucache.progress import Progress, note
from tpucache.runs import INFO_NAME
from tpucache.store.fields import IMAGE
from tpucache.text import duration_text
from tpucache.training.data import RunData, begin, prepare_data
from tpucache.training.defaults import Custom, decide_settings
from tpucache.training.device import Device
from tpucache.training.evaluation import Scores, compile_evaluation, measure, score
from tpucache.training.feed import Execution, Feeder, TrainingResidence, drawer, parts, take_execution
from tpucache.training.forward import IMAGENET
from tpucache.training.interrupt import Stopped, StopRequest
from tpucache.training.learner import Learner
from tpucache.training.lr_finder import decide_epochs
from tpucache.training.options import RunOptions
from tpucache.training.pace import LEAST_REPLAYS, REPLAY_SECONDS, Account, Building, Pace, PaceMeter, ceiling
from tpucache.training.run.files import (
    BackgroundWriter,
    continued_settings,
    hold_run,
    open_run,
    snapshot_best,
    snapshot_run,
    snapshot_validation,
    write_info,
)
from tpucache.training.run.report import (
    TrainReport,
    epoch_line,
    finished_report,
    make_report,
    read_account,
    write_account,
    write_report,
)
from tpucache.training.run.state import Losses, Row, RunState, StepPlan, make_plan
from tpucache.training.settings import AUTO, TrainSettings
from tpucache.training.watch import TensorBoard, drawn_curves
from tpucache.training.weights import InitialWeights, initial_weights

_WATCHED: Final = ("images_per_second", "waited", "device_idle")
_REPLAY_SHARE: Final = 0.02  # of a run's time: the replay takes at most this long

_log = logging.getLogger("tpucache")


def train(
    run: str | Path,
    settings: TrainSettings,
    train_set: CachedDataset,
    valid_set: CachedDataset | None,
    device: Device,
    options: RunOptions | None = None,
    custom: Custom | None = None,
) -> TrainReport:
    """Train a model on a cache, evaluate it after each epoch, and write checkpoints, a history and a report to `run`.

    A resumed run continues from its last checkpoint with the samples that are left of the epoch. On the same backend it
    ends in the same weights as without the interruption. A finished run is not changed, and its report is returned.

    On SIGINT and SIGTERM a checkpoint is saved and KeyboardInterrupt raised. Errors from reading data are raised here,
    too.

    With several processes, each calls this function and reads its slice of every batch. Only the main process uses the
    folder. When one process has to stop, all stop after the same step; when one ends, the other processes raise
    TrainingError.
    """
    run, options, processes = Path(run), options or RunOptions(), device.processes
    if not processes.is_main:
        options = replace(options, watchers=(), tensorboard=False, curves=False, on_epoch=None)
    stop, account = options.stop or StopRequest(options.time_limit), options.account or Account()
    stop.share(processes.largest_before(), is_alone=processes.world_size == 1)
    account.take_out("compiling", lambda: device.counters().compile_seconds)
    # A resumed run keeps its settings, even where the present data or device would lead to other settings.
    given = settings
    settings = processes.on_main(lambda: continued_settings(run, given, options.resume))
    settings = begin(settings, train_set, device)
    data = prepare_data(settings, train_set, valid_set, device)
    with hold_run(run, processes) as check_held:
        state, settings, saved = processes.on_main(lambda: open_run(run, settings, data, options.resume))
        initial = InitialWeights(settings, None)
        if saved is None:
            initial = processes.on_main(
                lambda: initial_weights(run, settings, data.channels, data.class_names, data.train_set.manifest)
            )
            settings = initial.settings
            if settings.epochs == AUTO:
                settings = decide_epochs(initial, data, device, custom, stop, 1 + options.following)
        plan = make_plan(settings, len(data.train_set))
        _report_epochs(options, state.rows)
        if plan.is_finished(state) and (earlier := processes.on_main(lambda: finished_report(run))) is not None:
            return earlier
        account.add_earlier(*processes.on_main(lambda: read_account(run)))
        decided = decide_settings(settings, data.train_set, data.task, device, custom)
        learner = Learner(decided, data.train_set, data.task, device, initial.weights)
        if saved is not None:
            learner.load_state_dict(saved)
        elif learner.matched is not None:
            _log.warning("%s: %s", settings.weights, learner.matched)
            if learner.image_differences:
                _log.warning("%s", learner.image_differences)
        processes.on_main(lambda: _write_info(run, settings, learner, data, options.name))
        note(f"{options.name}: {_describe(learner, data, plan)}")
        if getattr(device, "compiles", True):  # a plug-in's device may lack it
            note(f"{options.name}: compiling")
        watchers = options.watchers
        with stop.on_signals(), contextlib.ExitStack() as stack:
            if options.tensorboard:
                board = stack.enter_context(TensorBoard(run / "tensorboard"))
                watchers = [*watchers, board]
            losses = Losses(state.losses, watchers, processes.mean, learner.advice, device.fetch)
            with (
                device.fast_products(),
                drawn_curves(run if options.curves else None, learner.schedule, state),
                BackgroundWriter() as writer,
            ):
                pace, stopped = _run_steps(
                    _Loop(
                        run,
                        learner,
                        data,
                        plan,
                        state,
                        replace(options, watchers=watchers),
                        stop,
                        losses,
                        account,
                        writer,
                        check_held,
                        Building(data.train_set),
                    )
                )
            report = replace(make_report(learner, data.train_set, plan, state, pace, account), chosen=options.chosen)
            processes.on_main(lambda: write_report(run, report))
        if stopped is not None:
            raise stop.to_error(stopped)
        return report


def _write_info(run: Path, settings: TrainSettings, learner: Learner, data: RunData, name: str) -> None:
    """Write `run.json`, unless the cache is still being built: then it is written with the first checkpoint.

    Print a note that begins with `name`, if images are normalised by ImageNet's values because the cache has none yet.
    """
    if data.is_finished:
        write_info(run, learner, data)
    if settings.mean is None and settings.std is None and learner.settings.mean == IMAGENET[0]:
        note(
            f"{name}: images are normalised by ImageNet's mean and deviation, because a cache that may still be being "
            "built has none yet (--mean and --std replace them)"
        )


@dataclass(frozen=True)
class _Loop:
    """`check_held` raises TrainingError if another process may have taken over the run's folder."""

    folder: Path
    learner: Learner
    data: RunData
    plan: StepPlan
    state: RunState
    options: RunOptions
    stop: StopRequest
    losses: Losses
    account: Account
    writer: BackgroundWriter
    check_held: Callable[[], None]
    building: Building

    def check(self) -> None:
        self.stop.check(self.plan.describe(self.state))


def _describe(learner: Learner, data: RunData, plan: StepPlan) -> str:
    device, valid = learner.device, data.valid_set
    where = device.torch_device.type if device.name == "torch" else device.name
    where += f", {device.cores} cores" if device.cores > 1 else ""
    validation = "" if valid is None else f", {len(valid):,} to validate on"
    epochs, steps = (
        f"{count:,} {name}{'s' * (count != 1)}" for name, count in (("epoch", plan.epochs), ("step", plan.per_epoch))
    )
    return f"{learner.settings.model} on {where}; {len(data.train_set):,} samples{validation}; {epochs} of {steps}"


def _report_epochs(options: RunOptions, rows: Sequence[Row]) -> None:
    if options.on_epoch is not None:
        for row in rows:
            options.on_epoch(epoch_line(row))


def _note(run: _Loop, progress: Progress, idle: float) -> str:
    plan, following, network = run.plan, run.options.following, run.data.train_set.network
    kept, all_left = network.progress if network is not None else "", ""
    if run.building.text:
        kept = run.building.text
    if following and progress.rate:
        steps = (1 + following) * plan.steps - run.state.steps
        all_left = f"{duration_text(steps * run.learner.settings.batch / progress.rate)} for all folds"
    return ", ".join(filter(None, (plan.progress(run.state), all_left, f"idle {idle:.0%}", kept)))


def _run_steps(run: _Loop) -> tuple[Pace, Stopped | None]:
    learner, plan, state, options = run.learner, run.plan, run.state, run.options
    settings, device = learner.settings, learner.device
    residence = _open_residence(run)
    images = settings.batch * settings.steps_per_execution
    execution: Execution = []
    stopped = None
    account = run.account

    def warmed() -> bool:
        progress.restart_clock()
        return _decide_residence(run, residence)

    _compile_validation(run, residence)  # errors in it are raised now, not after the first epoch
    with (
        _feeder(run, residence) as feeder,
        _progress(run) as progress,
    ):
        # `warmed` compiles the evaluation again: after a step, averaged weights have another layout on the cores.
        meter = PaceMeter(device, feeder, warmed=warmed, building=run.building)
        stream = iter(feeder)
        account.begin("steps")
        account.take_out("waiting", lambda: feeder.waited_seconds)
        meter.resume(_size(run, state.steps))
        try:
            while not plan.is_finished(state):
                if plan.awaits_evaluation(state):
                    meter.pause()  # a sync point
                    _end_epoch(run, meter.end_epoch(), residence)
                    meter.resume(_size(run, state.steps))
                else:
                    execution = []  # frees the batches before the next ones are taken
                    execution = take_execution(stream, settings)
                    meter.expect_rows(execution[0][0].rows is not None)
                    _take_steps(run, execution)
                    progress.advance(images, _note(run, progress, meter.idle))
                    meter.step(settings.steps_per_execution, images)  # may end the warm-up
                    if options.needs_checkpoint(state.steps, settings) and not plan.awaits_evaluation(state):
                        meter.pause()  # a sync point
                        _save_place(run)
                        meter.resume(_size(run, state.steps))
                if not plan.is_finished(state):
                    run.check()
        except Stopped as error:
            stopped = error
            meter.pause()
            _save_place(run)
        meter.pause()
        pace = replace(meter.pace(), resident=residence.describe())
        if pace.steps and options.replay and not run.stop.is_due:
            pace = _with_ceiling(run, pace, execution, images)
        account.begin("checkpoints")
        device.processes.on_main(run.writer.flush)
        account.begin("report")
    return pace, stopped


def _open_residence(run: _Loop) -> TrainingResidence:
    learner, data = run.learner, run.data
    train_set = learner.task.as_learned(data.train_set)
    valid_set = None if data.valid_set is None else learner.task.as_learned(data.valid_set)
    return TrainingResidence(run.options.resident, learner.settings, train_set, learner.device, valid_set)


def _decide_residence(run: _Loop, residence: TrainingResidence) -> bool:
    becomes_resident = residence.decide()
    _compile_validation(run, residence)
    return becomes_resident


def _feeder(run: _Loop, residence: TrainingResidence) -> Feeder:
    settings, device, steps = run.learner.settings, run.learner.device, run.state.steps
    train_set, processes = run.learner.task.as_learned(run.data.train_set), device.processes
    epochs, pin_memory = run.plan.epochs, device.pin_memory
    batches = parts(settings, train_set, steps, epochs, pin_memory=pin_memory, processes=processes, residence=residence)
    draw, first = drawer(settings, run.data.train_set, processes), steps * settings.accumulate
    return Feeder(batches, device, draw=draw, first=first, resident=residence)


def _compile_validation(run: _Loop, residence: TrainingResidence) -> None:
    """While the cache is being built, compile on training samples, as validation samples come later."""
    valid_set, train_set = run.data.valid_set, run.data.train_set
    if valid_set is not None and not valid_set.is_finished and valid_set.cache is train_set.cache:
        valid_set = train_set
    with run.account.part("evaluation"):
        if residence.is_resident:
            compile_evaluation(run.learner, valid_set, residence.keep)
        else:
            compile_evaluation(run.learner, valid_set)


def _progress(run: _Loop) -> Progress:
    each = run.learner.settings.batch
    unit = "images" if IMAGE in run.data.train_set.names else "samples"
    return Progress(run.plan.steps * each, run.options.name, unit, run.state.steps * each)


def _size(run: _Loop, step: int) -> int | None:
    """Return the image size in a step, in pixels; None is the size of the cache's images."""
    return run.learner.settings.sizes.at(step // run.plan.per_epoch)


def _take_steps(run: _Loop, execution: Execution) -> None:
    learner, state = run.learner, run.state
    learner.resize(_size(run, state.steps))
    for batch in execution:
        # Forward, backward, optimizer, averaged weights. The loss stays on the device and is read later.
        loss = learner.step(batch, learner.schedule(state.steps), state.steps)
        run.losses.append(loss)
        state.steps += 1
    learner.device.step_end()  # only now is the graph sent to the device


def _end_epoch(run: _Loop, pace: Pace, residence: TrainingResidence) -> None:
    """If the run has to stop during the evaluation, the state stays as it was."""
    learner, data, state = run.learner, run.data, run.state
    run.losses.settle()
    metrics, scores = _evaluate(run, data.valid_set, residence)
    row = run.plan.epoch_row(state, learner.schedule(state.steps - 1).lr, metrics)
    if not learner.settings.sizes.is_one:
        row["size"] = _size(run, state.steps - 1)
    state.rows.append(row)
    if state.keep_best(learner.watched.value(metrics)):
        with run.account.part("checkpoints"):
            learner.device.processes.on_main(lambda: _submit_best(run, scores))
    for watcher in run.options.watchers:
        # The history does not have the pace, so that a resumed run has the same rows.
        watcher.epoch({**row, **{name: getattr(pace, name) for name in _WATCHED}})
    _save(run)
    _report_epochs(run.options, [row])


def _evaluate(
    run: _Loop, valid_set: CachedDataset | None, residence: TrainingResidence
) -> tuple[dict[str, float], Scores | None]:
    """Return ({}, None) without validation samples."""
    if valid_set is None:
        return {}, None
    with run.account.part("evaluation"):
        scores = score(run.learner, valid_set, run.check, residence.keep)
    with run.account.part("metrics"):
        return measure(run.learner, valid_set, scores), scores


def _submit_best(run: _Loop, scores: Scores | None) -> None:
    learner, data = run.learner, run.data
    run.writer.submit(run.check_held)
    run.writer.submit(snapshot_best(run.folder, learner, data))
    if data.valid_set is not None and scores is not None:
        kept = scores.values, scores.errors, scores.maps
        run.writer.submit(snapshot_validation(run.folder, learner, data.valid_set, *kept))
    if run.options.watchers:
        run.writer.flush()  # a watcher may read the files


def _save(run: _Loop) -> None:
    run.losses.settle()
    with run.account.part("checkpoints"):
        run.learner.device.processes.on_main(lambda: _submit_state(run))


def _save_place(run: _Loop) -> None:
    """A checkpoint could not describe a cache that is still being built."""
    if run.data.is_finished:
        _save(run)
    else:
        note(f"{run.options.name}: the cache is not finished, so no checkpoint is saved; its finished part is kept")


def _submit_state(run: _Loop) -> None:
    run.writer.submit(run.check_held)
    if not (run.folder / INFO_NAME).exists():  # the cache was not finished when the run began
        run.writer.submit(functools.partial(write_info, run.folder, run.learner, run.data))
    run.writer.submit(snapshot_run(run.folder, run.learner, run.data, run.state))
    seconds, wall = run.account.seconds(), run.account.wall_seconds()
    run.writer.submit(lambda: write_account(run.folder, seconds, wall))


def _with_ceiling(run: _Loop, pace: Pace, execution: Execution, images: int) -> Pace:
    """If even the fewest repetitions would take longer, there is no replay, and the pace is returned as it is."""
    device, account = run.learner.device, run.account
    with account.part("replay"):
        budget = _REPLAY_SHARE * account.wall_seconds()
        step = pace.step_seconds * (1 - pace.device_idle)  # the replay's data are on the device already
        least = LEAST_REPLAYS * step * run.learner.settings.steps_per_execution
        if not device.processes.on_main(lambda: least <= max(budget, REPLAY_SECONDS)):
            return pace
        return pace.with_ceiling(ceiling(functools.partial(_replay, run, execution), device, images, budget))


def _replay(run: _Loop, execution: Execution) -> None:
    """The weights change, but are no longer needed."""
    last = run.plan.steps - 1
    for batch in execution:
        run.learner.step(batch, run.learner.schedule(last), last)
    run.learner.device.step_end()
