"""Cross-validation: each fold's model is trained in turn, then predicts the fold's samples, which it has not seen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tpucache.errors import UnfinishedError, UsageError
from tpucache.loading.columns import fold_splits
from tpucache.loading.dataset import CachedDataset
from tpucache.runs import OUT_OF_FOLD_NAME, fold_folder
from tpucache.training.data import begin, prepare_data
from tpucache.training.device import Device
from tpucache.training.device.base import current
from tpucache.training.interrupt import Stopped, StopRequest
from tpucache.training.loop import train
from tpucache.training.options import RunOptions
from tpucache.training.pace import Account
from tpucache.training.prediction import Predictor, predict_parts
from tpucache.training.run.files import check_folds, continued_settings, hold_run, open_folds
from tpucache.training.run.report import (
    FoldsReport,
    TrainReport,
    make_folds_report,
    read_folds_report,
    read_report,
    write_report,
)
from tpucache.training.settings import TrainSettings


@dataclass(frozen=True)
class Fold:
    """One fold of a cross-validation: its name, the folder of its run, and its training and validation samples."""

    name: str
    run: Path
    train_set: CachedDataset
    valid_set: CachedDataset

    @property
    def report(self) -> TrainReport | None:
        return read_report(self.run)


@dataclass(frozen=True)
class Folds:
    """All folds of a cache, and the folder of the run that trains them.

    `dataset` has the validation samples of all folds.
    """

    run: Path
    dataset: CachedDataset
    folds: Sequence[Fold]


def open_all_folds(run: str | Path, train_set: CachedDataset, valid_set: CachedDataset, resume: bool) -> Folds:
    """Return the folds of a cache, for a run that trains a model for each of them; write nothing.

    `train_set` and `valid_set` both have all samples of the cache. With several processes, open the device first: then
    only the main process uses the folder. Raises UsageError if the cache has no folds, a set is a selection or has
    other samples than the other set, or the folder has a run of other folds, or any while `resume` is false;
    TrainingError if the folder cannot be read.
    """
    run, splits = Path(run), fold_splits(valid_set.table)
    _check_whole(train_set, valid_set)
    current().on_main(lambda: check_folds(run, list(splits), resume))
    folds = [
        Fold(name, fold_folder(run, name), train_set.select(split.train), valid_set.select(split.valid))
        for name, split in splits.items()
    ]
    validated = np.sort(np.concatenate([split.valid for split in splits.values()]))
    dataset = valid_set if len(validated) == len(valid_set) else valid_set.select(validated)
    return Folds(run, dataset, folds)


def _check_whole(train_set: CachedDataset, valid_set: CachedDataset) -> None:
    for name, dataset in (("training", train_set), ("validation", valid_set)):
        if not np.array_equal(dataset.positions, np.arange(dataset.manifest.samples)):
            raise UsageError(
                f"the {name} samples are a selection of {dataset.directory}, and folds divide all samples of a cache, "
                "in its order: give the whole cache. `tpucache delete` makes a version without some samples"
            )
    if train_set.paths != valid_set.paths:
        raise UsageError(
            f"{train_set.directory} and {valid_set.directory} have other samples, or the same in another order: folds "
            "need the same samples to train on and to validate on"
        )


def train_folds(
    folds: Folds, settings: TrainSettings, device: Device, options: RunOptions | None = None
) -> FoldsReport:
    """Train each fold's model in turn, let each model predict its fold, and write the predictions and a report.

    Each fold is a run as `train` makes it. A resumed run continues in the fold that was interrupted; finished folds are
    not trained again. Several processes train each fold together. Raises the errors of `train` and `predict`.
    """
    options, processes = options or RunOptions(), device.processes
    stop, account = options.stop or StopRequest(options.time_limit), options.account or Account()
    stop.share(processes.largest_before(), is_alone=processes.world_size == 1)
    settings = _shared_settings(folds, settings, device)
    for fold in folds.folds:  # errors are raised now, not after earlier folds have trained
        prepare_data(settings, fold.train_set, fold.valid_set, device)
    with hold_run(folds.run, processes):
        processes.on_main(lambda: open_folds(folds.run, [fold.name for fold in folds.folds]))
        try:
            has_trained = _train_all(folds, settings, device, replace(options, stop=stop, account=account))
            report = processes.on_main(lambda: read_folds_report(folds.run))
            if has_trained or report is None or not report.finished:
                # The first fold's run has counted the time before it, such as staging.
                account = Account() if has_trained else account
                earlier = report
                account.add_earlier(*processes.on_main(lambda: _prediction_seconds(folds, earlier)))
                _report(folds, device, account)
                report = _predict_all(folds, settings, device, stop, account)
        except Stopped as stopped:
            raise stop.to_error(stopped) from None
        return report


def _shared_settings(folds: Folds, settings: TrainSettings, device: Device) -> TrainSettings:
    first, samples = folds.folds[0].run, min(len(fold.train_set) for fold in folds.folds)
    begun = device.processes.on_main(lambda: continued_settings(first, settings, resume=True))
    settings = replace(settings, batch_size=begun.batch_size, epochs=begun.epochs)
    return begin(settings, folds.folds[0].train_set, device, samples)


def _train_all(folds: Folds, settings: TrainSettings, device: Device, options: RunOptions) -> bool:
    has_trained = False
    for number, fold in enumerate(folds.folds):
        is_finished = device.processes.on_main(functools.partial(_is_finished, fold))
        if not is_finished:
            _report(folds, device)
            if options.stop is not None:
                options.stop.check(f"after {number} of {len(folds.folds)} folds")
        named = _progress_options(folds, number, None if is_finished else options.on_epoch)
        try:
            settings = _shared_settings(folds, settings, device)  # the first fold decides the number of epochs
            this_fold = replace(options, resume=True, **named)
            train(fold.run, settings, fold.train_set, fold.valid_set, device, this_fold)
        except UnfinishedError:
            _report(folds, device)
            raise
        except KeyboardInterrupt:  # perhaps only this process is interrupted: do not wait
            if device.processes.is_main:
                write_report(folds.run, _make_report(folds, device))
            raise
        if not is_finished:
            has_trained, options = True, replace(options, account=Account())
    return has_trained


def _is_finished(fold: Fold) -> bool:
    report = fold.report
    return report is not None and report.finished


def _progress_options(folds: Folds, number: int, on_epoch: Callable[[str], None] | None) -> dict[str, Any]:
    name, count = folds.folds[number].name, len(folds.folds)
    this_fold = None if on_epoch is None else lambda line: on_epoch(f"fold {name:<4} {line}")
    return {"name": f"fold {name} ({number + 1} of {count})", "following": count - number - 1, "on_epoch": this_fold}


def _predict_all(
    folds: Folds, settings: TrainSettings, device: Device, stop: StopRequest, account: Account
) -> FoldsReport:
    account.take_out("compiling", lambda: device.counters().compile_seconds)
    account.begin("evaluation")
    output = folds.run / OUT_OF_FOLD_NAME
    trust = [settings.model, *filter(None, [settings.eval_step])]
    parts = ((Predictor([fold.run], device, trust=trust), fold.valid_set) for fold in folds.folds)
    try:
        with stop.on_signals():
            metrics = predict_parts(
                parts, folds.dataset, output, settings.metric, lambda: stop.check("in the out-of-fold predictions")
            )
    except Stopped:
        _report(folds, device, account)
        raise
    return _report(folds, device, account, metrics)


def _prediction_seconds(folds: Folds, report: FoldsReport | None) -> tuple[dict[str, float], float]:
    if report is None:
        return {}, 0.0
    runs = [run for fold in folds.folds if (run := fold.report) is not None]
    seconds = {part: spent - sum(run.seconds.get(part, 0.0) for run in runs) for part, spent in report.seconds.items()}
    wall = report.wall_seconds - sum(run.wall_seconds for run in runs)
    return {part: max(0.0, spent) for part, spent in seconds.items()}, max(0.0, wall)


def _report(
    folds: Folds, device: Device, account: Account | None = None, metrics: dict[str, float] | None = None
) -> FoldsReport:
    def write() -> FoldsReport:
        report = _make_report(folds, device, account, metrics)
        write_report(folds.run, report)
        return report

    return device.processes.on_main(write)


def _make_report(
    folds: Folds, device: Device, account: Account | None = None, metrics: dict[str, float] | None = None
) -> FoldsReport:
    reports = {fold.name: report for fold in folds.folds if (report := fold.report) is not None}
    seconds = ({}, 0.0) if account is None else (account.seconds(), account.wall_seconds())
    return make_folds_report(folds.run, reports, (device.name, device.cores), seconds, metrics)
