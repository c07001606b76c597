"""The report of a run, and of a run of all folds, written when it finishes or stops."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import TrainingError
from tpucache.loading.dataset import CachedDataset
from tpucache.machine import peak_bytes
from tpucache.runs import ACCOUNT_NAME, BEST_NAME, FOLDS_NAME, LOCK_NAME, OUT_OF_FOLD_NAME, REPORT_NAME, fold_folder
from tpucache.store.fields import IMAGE
from tpucache.store.lock import is_held
from tpucache.text import rate_text, size_text
from tpucache.training.learner import Learner
from tpucache.training.pace import Account, Pace
from tpucache.training.run.saved import read_json
from tpucache.training.run.state import VALID, Row, RunState, StepPlan, metric_columns
from tpucache.training.weights import write_result

_LEAST_SHOWN: Final = 0.05  # seconds: shorter parts are not listed

_log = logging.getLogger("tpucache")


@dataclass(frozen=True)
class _Account:
    seconds: dict[str, float]
    wall_seconds: float


@dataclass(frozen=True)
class TrainReport:
    """Losses and learning rates step by step, metrics epoch by epoch, the pace, and the peak memory.

    The `watched` metric was best in `best_epoch` (0 if unknown). A run that `stopped_early` is finished. `seconds` are
    those of each part of the run, and `wall_seconds` is the total, added up over the processes that resumed it. `unit`
    is what the rates count: images, or samples if there are no images. `device` is the kind of device, such as cpu or
    cuda ("" if unknown). With several `processes`, `Pace.slowest` makes the pace, `host_peak_bytes` is the sum over all
    processes, `device_peak_bytes` is the largest, and all other fields are the main process's. `rates` says in words
    which learning rate, weight decay and schedule were used, and why. `batch`, `precision` and `chosen` say in words
    which batch size, precision and backend were used, and why.
    `network` has the figures of NetworkUse if the training samples come from a URL, and is empty otherwise.

    `steps` is the number for the whole run; a run that stopped before and can continue is not `finished`. Of the
    `samples`, each epoch leaves out `dropped_samples`, other samples every time: samples that do not fill a batch, and
    samples in batches that do not fill an execution of several steps, which are `dropped_by_execution`.
    """

    backend: str
    cores: int
    losses: Sequence[float]
    epochs: Sequence[Row]
    pace: Pace
    host_peak_bytes: int
    device_peak_bytes: int | None
    advice: str = ""
    finished: bool = True
    steps: int = 0
    samples: int = 0
    dropped_samples: int = 0
    dropped_by_execution: int = 0
    watched: str = ""
    best_epoch: int = 0
    stopped_early: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    wall_seconds: float = 0.0
    unit: str = "images"
    device: str = ""
    processes: int = 1
    rates: str = ""
    precision: str = ""
    batch: str = ""
    chosen: str = ""
    network: Mapping[str, float] = field(default_factory=dict)
    learning_rates: Sequence[float] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)

    def lines(self, *, epochs: bool = True) -> list[str]:
        """Return the report as lines of text; `epochs` says whether there is a line for each epoch."""
        rows = [epoch_line(row) for row in self.epochs if epochs]
        return [*rows, *(f"{name:<10} {text}" for name, text in self.figures().items()), self.advice]

    def figures(self) -> dict[str, str]:
        """Return the figures of the report that there are, as texts by name."""
        pace = self.pace
        figures = {
            "best": self._best(),
            "unfinished": "" if self.finished else f"{len(self.losses):,} of {self.steps:,} steps",
            "optimizer": self.rates,
            "batch": self.batch,
            "precision": self.precision,
            "backend": f"{describe_device(self.backend, self.device, self.cores)}{self._in_processes()}",
        }
        if pace.steps:
            figures |= {
                "rate": f"{rate_text(pace.images_per_second)} {self.unit}/s",
                "step": f"{pace.step_seconds * 1e3:,.1f} ms, mean of {pace.steps:,}",
                "idle": f"{pace.device_idle:.1%} of that time, the device ran nothing",
            }
        figures |= {
            "network": self._network(),
            "cache": self._built(),
            "compiles": f"{pace.compiles} after the warm-up{_of_graphs(pace.graphs)}",
            "received": f"{pace.received_bytes / 1e6:,.0f} MB{self._later()}",
            "resident": pace.resident,
            "sizes": self._sizes(),
            "memory": f"{self._memory()}, at most",
            "time": self._time(),
            "dropped": self._dropped(),
        }
        return {name: text for name, text in figures.items() if text}

    def _memory(self) -> str:
        host = f"{self.host_peak_bytes / 1e6:,.0f} MB on the host"
        if self.device_peak_bytes is not None:
            return f"{host}, {self.device_peak_bytes / 1e6:,.0f} MB on the fullest core"
        return host if self.device in ("", "cpu") else f"{host}, the device's is not reported"

    def _later(self) -> str:
        each, cpu = self.pace.later_bytes_per_step, self.pace.feeding_cpu
        if each is None or cpu is None:
            return ""
        return f", after the first epoch {each / 1e3:,.1f} kB a step, for {cpu:.1%} of a processor"

    def _sizes(self) -> str:
        return "; ".join(
            f"{size} pixels: {each.get('images', 0) / max(each.get('seconds', 0.0), 1e-9):,.0f} {self.unit}/s, "
            f"{each.get('received_bytes', 0) / max(1, each.get('images', 0)) / 1e3:,.1f} kB each"
            for size, each in self.pace.sizes.items()
        )

    def _in_processes(self) -> str:
        where = f" in each of {self.processes} processes" if self.processes > 1 else ""
        return f"{where}, as {self.chosen}" if self.chosen else where

    def _network(self) -> str:
        use = self.network
        if not use:
            return ""
        if not use["bytes"]:
            return "nothing read: all records were on this machine"
        share, each = use["rate"] / max(1.0, use["best_rate"]), use["bytes"] / max(1.0, use["needed_bytes"])
        return (
            f"{use['bytes'] / 1e6:,.1f} MB read, {each:.2f} times the MB needed; the link had up to "
            f"{use['best_rate'] / 1e6:,.1f} MB/s, and {share:.0%} of that on average while in use; waited "
            f"{use['waited']:,.1f} s for it"
        )

    def _built(self) -> str:
        built, last = self.pace.built, len(self.epochs)
        if not built:
            return ""
        first, after = built["epochs"], ""
        if built["later"] is not None:
            epochs = f"epoch {last}" if first + 1 >= last else f"epochs {first + 1} to {last}"
            after = f"; {epochs}: {built['later']:.1%}"
        size = "not finished: run again to continue" if built["bytes"] is None else size_text(built["bytes"])
        return (
            f"{'epoch 1' if first <= 1 else f'epochs 1 to {first}'} built the cache: waited "
            f"{built['waited']:.0%}{after}; the cache is in {built['cache']}, {size}"
        )

    def _best(self) -> str:
        if not self.best_epoch:
            return ""
        early = f"; stopped early after epoch {self.epochs[-1]['epoch']}" if self.stopped_early else ""
        return f"epoch {self.best_epoch}, by {self.watched}{early}"

    def _time(self) -> str:
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name.replace('_', ' ')} {spent:,.1f}" for name, spent in parts if spent >= _LEAST_SHOWN)
        return f"{self.wall_seconds:,.1f} s: {listed}" if self.wall_seconds else ""

    def _dropped(self) -> str:
        reasons = {
            "that do not fill a batch": self.dropped_samples - self.dropped_by_execution,
            "by --steps-per-execution": self.dropped_by_execution,
        }
        text = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
        if not self.dropped_samples:
            return ""
        return f"{self.dropped_samples:,} of {self.samples:,} samples an epoch, different samples each time: {text}"


def describe_device(backend: str, device: str, cores: int) -> str:
    name = backend if device in ("", backend) else f"{backend} on {device}"
    return f"{name}, {cores} core{'s' * (cores > 1)}" if cores else name


def make_report(
    learner: Learner,
    train_set: CachedDataset,
    plan: StepPlan,
    state: RunState,
    pace: Pace,
    account: Account,
) -> TrainReport:
    processes = learner.device.processes
    gathered = processes.gather((pace, peak_bytes(), learner.device.peak_bytes()))
    return processes.on_main(lambda: _merged_report(learner, train_set, plan, state, account, gathered))


def _merged_report(
    learner: Learner,
    train_set: CachedDataset,
    plan: StepPlan,
    state: RunState,
    account: Account,
    gathered: Sequence[tuple[Pace, int, int | None]],
) -> TrainReport:
    settings, device, samples = learner.settings, learner.device, len(train_set)
    paces, host_peaks, device_peaks = zip(*gathered, strict=True)
    pace, use = Pace.slowest(paces), train_set.network
    return TrainReport(
        backend=device.name,
        cores=device.cores,
        losses=state.losses,
        epochs=state.rows,
        pace=pace,
        host_peak_bytes=sum(host_peaks),
        device_peak_bytes=max((peak for peak in device_peaks if peak is not None), default=None),
        advice=pace.advice(settings, in_memory=train_set.reading.way != "stream"),
        finished=plan.is_finished(state),
        steps=plan.steps,
        samples=samples,
        dropped_samples=samples - plan.per_epoch * settings.batch,
        watched=learner.watched.metric,
        best_epoch=0 if state.best is None else state.best_epoch,
        stopped_early=plan.has_stopped_early(state),
        seconds=account.seconds(),
        wall_seconds=account.wall_seconds(),
        unit="images" if IMAGE in train_set.names else "samples",
        device=device.torch_device.type,
        dropped_by_execution=(samples // settings.batch - plan.per_epoch) * settings.batch,
        processes=device.processes.world_size,
        rates=learner.decided.rates,
        precision=learner.decided.precision,
        batch=learner.decided.batch,
        network={} if use is None else dict(use._asdict()),
        learning_rates=[learner.schedule(step).lr for step in range(len(state.losses))],
    )


def write_report(run: str | Path, report: TrainReport | FoldsReport) -> None:
    write_json(Path(run) / REPORT_NAME, report.to_dict())
    (Path(run) / ACCOUNT_NAME).unlink(missing_ok=True)


def write_account(run: str | Path, seconds: Mapping[str, float], wall: float) -> None:
    """Write the seconds of a run so far, in case the run never writes its report."""
    write_json(Path(run) / ACCOUNT_NAME, {"seconds": seconds, "wall_seconds": wall})


def read_account(run: str | Path) -> tuple[Mapping[str, float], float]:
    """Return the seconds of each part of a run so far, and their total, from its account or else its report."""
    found = read_json(Path(run) / ACCOUNT_NAME, _Account) or read_report(run)
    return ({}, 0.0) if found is None else (found.seconds, found.wall_seconds)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_result(path, json.dumps(values, indent=1).encode())


def read_report(run: str | Path) -> TrainReport | None:
    return read_json(Path(run) / REPORT_NAME, TrainReport)


def ensure_report(run: str | Path, backend: str, cores: int, account: Account) -> TrainReport:
    report = read_report(run)
    report = report or replace(unfinished_report(), backend=backend, cores=cores, host_peak_bytes=peak_bytes())
    if not report.finished and not is_held(Path(run) / LOCK_NAME):
        account.add_earlier(*read_account(Path(run)))
        report = replace(report, seconds=account.seconds(), wall_seconds=account.wall_seconds())
        write_report(run, report)
    return report


def unfinished_report() -> TrainReport:
    """Return the report of a run that has not written any."""
    pace = Pace(0, 0.0, 0.0, 0.0, 0.0, 0, 0)
    return TrainReport("", 0, [], [], pace, 0, None, pace.advice(), finished=False)


def finished_report(run: str | Path) -> TrainReport | None:
    """Return the report of a finished run, and log that nothing is left to do; None without such a report."""
    report = read_report(run)
    if report is None or not report.finished:
        return None
    _log.warning("%s holds a finished run: nothing is left to do, and nothing was changed", run)
    return report


def _of_graphs(graphs: int | None) -> str:
    return "" if graphs is None else f", of {graphs} graph{'' if graphs == 1 else 's'} in all"


def epoch_line(row: Row) -> str:
    shown = {name.removeprefix(VALID): row[name] for name in ("train_loss", *metric_columns([row])) if name in row}
    return f"epoch {row['epoch']:>3}  {_shown(shown)}"


_VERSION: Final = 1


@dataclass(frozen=True)
class _Names:
    version: int
    folds: list[str]


@dataclass(frozen=True)
class FoldScore:
    """The result of one fold.

    `fold` is its name, and `run` the name of its run's folder. `finished` says whether this run is finished.
    `best_epoch` is its best epoch, from 1, and `metrics` are the validation metrics of that epoch. `samples` is the
    number of its validation samples.
    """

    fold: str
    run: str
    finished: bool
    best_epoch: int
    samples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class FoldsReport:
    """The report on the folds that have been trained so far.

    `mean` and `deviation` are those of the folds' metrics. `out_of_fold` has the metrics over all samples at once, each
    predicted by the model that has not seen it, and `output` is the CSV of these predictions. These four are empty
    until the last fold is finished. `seconds` are those of each part of the work, and `wall_seconds` is the total, over
    all folds.
    """

    backend: str
    cores: int
    folds: Sequence[FoldScore]
    mean: Mapping[str, float]
    deviation: Mapping[str, float]
    out_of_fold: Mapping[str, float]
    output: str
    finished: bool
    seconds: Mapping[str, float]
    wall_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        lines = []
        for each in self.folds:
            state = f"best epoch {each.best_epoch:>3}" if each.finished else "unfinished    "
            lines.append(f"fold {each.fold:<4} {state}  {_shown(each.metrics)}")
        if self.finished:
            spread = {name: f"{mean:.4f} ± {self.deviation[name]:.4f}" for name, mean in self.mean.items()}
            lines.append(f"mean      {'  '.join(f'{name} {text}' for name, text in spread.items())}")
            lines.append(f"all       {_shown(self.out_of_fold)}  out of fold: {self.output}")
        return [*lines, f"time      {self.wall_seconds:,.1f} s"]


def read_folds(run: Path) -> list[str] | None:
    """Return the names of the folds of a run; None for another kind of run."""
    path = run / FOLDS_NAME
    found = read_json(path, _Names)
    if found is not None and found.version != _VERSION:
        raise TrainingError(f"{path} was written by another version of tpucache: give another folder")
    return None if found is None else found.folds


def write_folds(run: Path, names: Sequence[str]) -> None:
    write_json(run / FOLDS_NAME, {"version": _VERSION, "folds": list(names)})


def run_folders(run: Path) -> list[Path]:
    names = read_folds(run)
    if names is None:
        return [run]
    folders = [fold_folder(run, name) for name in names]
    missing = [name for name, folder in zip(names, folders, strict=True) if not (folder / BEST_NAME).exists()]
    if missing:
        raise TrainingError(
            f"{run} has no weights of fold {', '.join(missing)} yet: continue the run with train --folds --resume first"
        )
    return folders


def make_folds_report(
    run: Path,
    reports: Mapping[str, TrainReport],
    device: tuple[str, int],
    account: tuple[Mapping[str, float], float],
    out_of_fold: Mapping[str, float] | None = None,
) -> FoldsReport:
    scores = [_make_score(fold, fold_folder(run, fold), report) for fold, report in reports.items()]
    seconds, wall = dict(account[0]), account[1] + sum(report.wall_seconds for report in reports.values())
    for report in reports.values():
        for part, spent in report.seconds.items():
            seconds[part] = seconds.get(part, 0.0) + spent
    if out_of_fold is None:
        return FoldsReport(*device, scores, {}, {}, {}, "", False, seconds, wall)
    names = [name for name in scores[0].metrics if all(name in score.metrics for score in scores)]
    columns = {name: [score.metrics[name] for score in scores] for name in names}
    mean = {name: float(np.mean(values)) for name, values in columns.items()}
    deviation = {name: float(np.std(values)) for name, values in columns.items()}
    return FoldsReport(*device, scores, mean, deviation, out_of_fold, OUT_OF_FOLD_NAME, True, seconds, wall)


def _make_score(fold: str, run: Path, report: TrainReport) -> FoldScore:
    row = report.epochs[report.best_epoch - 1] if report.epochs else {}  # the last row where best_epoch is 0
    metrics = {name.removeprefix(VALID): row[name] for name in metric_columns([row])}
    samples = int(row.get(f"{VALID}samples", 0))
    return FoldScore(fold, run.name, report.finished, report.best_epoch, samples, metrics)


def read_folds_report(run: str | Path) -> FoldsReport | None:
    return read_json(Path(run) / REPORT_NAME, FoldsReport)


def _shown(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
