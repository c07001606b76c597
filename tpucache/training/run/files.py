"""The folder of a run: its lock, the state to resume from, best weights, predictions, history, and their writer.

`best.pt` is written first, then `last.pt`, whose state says that those weights are the best, and then `history.csv`,
each atomically. If a run is killed between two of these writes, the resumed run repeats the steps that `last.pt` does
not contain, with the same result.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import TrainingError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.native import Array
from tpucache.recipe import image_settings
from tpucache.runs import (
    BEST_NAME,
    FOLDS_NAME,
    HISTORY_NAME,
    INFO_NAME,
    LAST_NAME,
    LOCK_NAME,
    RUN_NAMES,
    VALIDATION_NAME,
    fold_folder,
    is_run,
)
from tpucache.store import lock
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.samples import encode_columns
from tpucache.training.data import RunData
from tpucache.training.device.base import Processes
from tpucache.training.learner import Learner
from tpucache.training.run.report import read_folds, write_folds
from tpucache.training.run.saved import VERSION, load_last
from tpucache.training.run.state import Row, RunState, make_plan
from tpucache.training.settings import TrainSettings, as_decided, setting_differences, settings_from, undecided
from tpucache.training.weights import save_checkpoint, write_result

_log = logging.getLogger("tpucache")

_WAITING: Final = 2  # queued writes, the best weights and the state of one epoch; more would take too much memory


@contextlib.contextmanager
def hold_run(run: Path, processes: Processes) -> Iterator[Callable[[], None]]:
    """Make a run's folder and hold its lock; yield a function that checks that the lock is still held.

    `hold_run` raises UsageError when another program trains in the folder, or the folder is a cache; TrainingError when
    the folder cannot be written.
    """

    def refusal(holder: str) -> UsageError:
        return UsageError(
            f"{run} is being trained in by {holder}: wait until it ends, or stop it (--resume continues it then), or "
            "give another folder"
        )

    def take(stack: contextlib.ExitStack) -> None:
        _refuse_cache(run)
        try:
            run.mkdir(parents=True, exist_ok=True)
            stack.callback(_remove_empty, run)
            holds.append(stack.enter_context(lock.hold(run / LOCK_NAME, refusal)))
        except OSError as error:
            raise TrainingError(f"{run} cannot be written: {error}") from error

    def check() -> None:
        if any(held.is_lost() for held in holds):
            raise TrainingError(
                f"{run / LOCK_NAME} was removed or taken over: another process may be training in {run}, so nothing "
                "more is written to it. Add --resume to continue when the other process has ended"
            )

    holds: list[lock.Hold] = []
    with contextlib.ExitStack() as stack:
        processes.on_main(lambda: take(stack))
        yield check


def _refuse_cache(run: Path) -> None:
    if (run / MANIFEST_NAME).exists():
        raise UsageError(f"{run} is a cache: give another folder for the run")


def _remove_empty(run: Path) -> None:
    with contextlib.suppress(OSError):  # the folder is not empty
        run.rmdir()


def continued_settings(run: Path, settings: TrainSettings, resume: bool) -> TrainSettings:
    """Return `settings`; if they resume the run in the folder, undecided settings get the values of that run."""
    is_known = not undecided(settings) or not resume or not (run / LAST_NAME).exists()
    return settings if is_known else as_decided(settings, settings_from(load_last(run)["settings"]))


def open_run(
    run: Path, settings: TrainSettings, data: RunData, resume: bool
) -> tuple[RunState, TrainSettings, Mapping[str, Any] | None]:
    """Return the state of the run in a folder, its settings, and its learner's state, which is None for a new run."""
    path = run / LAST_NAME
    if (run / FOLDS_NAME).exists():
        raise UsageError(f"{run} is a run of all folds: continue it with --folds, or give another folder")
    _make_folder(run)
    if not path.exists():
        if (run / HISTORY_NAME).exists():
            raise UsageError(f"{run} has the history of a run, but not its {LAST_NAME}: give another folder")
        return RunState(), settings, None
    if not resume:
        raise UsageError(f"{run} already contains a run: add --resume to continue it, or give another folder")
    content = load_last(run)
    before = settings_from(content["settings"])
    settings = as_decided(settings, before)
    changed = setting_differences(before, settings) + _data_differences(path, content, data)
    state = RunState(**content["stand"])
    if changed:
        advice = "Give the same options and data to continue, or another folder"
        if data.train_set.manifest.parents:
            advice += ". If the cache has changed since, give the version that the run began on: CACHE@N"
        if settings.epochs != before.epochs and make_plan(before, len(data.train_set)).is_finished(state):
            advice = (
                "The run is finished, and its learning rate has completed the schedule: for more epochs begin a new "
                f"run with its weights, --run OTHER --weights {run}"
            )
        raise UsageError(f"{run} was begun with other options or data: {'; '.join(changed)}. {advice}")
    write_history(run, state.rows)
    return state, settings, content["learner"]


def write_history(run: Path, rows: Sequence[Row]) -> None:
    text = io.StringIO(newline="")
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path, data = run / HISTORY_NAME, text.getvalue().encode()
    with contextlib.suppress(OSError):  # an unreadable file is written anew
        if path.read_bytes() == data:
            return
    write_result(path, data)


def check_folds(run: Path, names: Sequence[str], resume: bool) -> None:
    """Raise UsageError for a folder with a run that has other folds, or that must not be resumed."""
    before = read_folds(run)
    if before is None and is_run(run):
        raise UsageError(f"{run} has a run of one model, not of all folds: give another folder, or leave --folds out")
    has_begun = any((fold_folder(run, name) / LAST_NAME).exists() for name in before or ())
    if has_begun and not resume:
        raise UsageError(f"{run} already contains a run: add --resume to continue it, or give another folder")
    if has_begun and before is not None and before != list(names):
        raise UsageError(
            f"{run} has the folds {', '.join(before)}, and the cache has {', '.join(names)}: give the same cache to "
            "continue, or another folder"
        )


def open_folds(run: Path, names: Sequence[str]) -> None:
    _make_folder(run)
    if read_folds(run) != list(names):
        write_folds(run, names)


def snapshot_run(run: Path, learner: Learner, data: RunData, state: RunState) -> Callable[[], None]:
    """Copy a run's state to the host; return the function that writes it to a checkpoint, with the run's history."""
    rows = [dict(row) for row in state.rows]
    stand = {**vars(state), "losses": [*state.losses], "rows": rows}
    content = {**_metadata(learner, data), "stand": stand, "learner": learner.checked_state()}

    def write() -> None:
        save_checkpoint(run / LAST_NAME, content)
        write_history(run, rows)

    return write


def snapshot_best(run: Path, learner: Learner, data: RunData) -> Callable[[], None]:
    """Copy the weights that were just evaluated to the host; return the function that writes them to `best.pt`."""
    constants = learner.task.constants()
    content = {
        **_metadata(learner, data),
        "model": learner.best_weights(),
        **({"labels": constants} if constants else {}),
    }
    return lambda: save_checkpoint(run / BEST_NAME, content)


def write_info(run: Path, learner: Learner, data: RunData) -> None:
    info = {
        "settings": learner.settings.to_dict(),
        "task": learner.task.name,
        "outputs": learner.task.outputs,
        "classes": list(learner.task.class_names(data.train_set.classes)),
        "training": _describe_data(data.train_set),
        "validation": None if data.valid_set is None else _describe_data(data.valid_set),
    }
    write_result(run / INFO_NAME, json.dumps(info, indent=1).encode())


def snapshot_validation(
    run: Path, learner: Learner, valid_set: CachedDataset, values: Array, errors: Array, maps: Mapping[int, Array]
) -> Callable[[], None]:
    """Return the function that writes `validation.npz`: the predictions for the validation samples.

    It has `positions` in the cache, `errors`, and the arrays of the task's `record`.
    """
    arrays: dict[str, Array] = {
        "positions": valid_set.positions,
        "errors": errors.astype(np.float32),
        **learner.task.record(values, valid_set.labels.numpy()),
    }
    if maps:
        arrays |= {"shown": np.array([*maps], np.int64), "maps": np.stack([*maps.values()])}
    return lambda: write_result(run / VALIDATION_NAME, encode_columns(arrays))


def _make_folder(run: Path) -> None:
    _refuse_cache(run)
    try:
        run.mkdir(parents=True, exist_ok=True)
        for name in RUN_NAMES:
            for path in run.glob(f".{name}.*.tmp"):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise TrainingError(f"{run} cannot be written: {error}") from error


def _data_differences(path: Path, content: Mapping[str, Any], data: RunData) -> list[str]:
    train_set = data.train_set
    now = {"fingerprint": train_set.manifest.fingerprint, "samples": len(train_set)}
    changed = [f"{name} {content[name]}, now {value}" for name, value in now.items() if content[name] != value]
    if changed:
        return changed
    return [
        f"the {name} data have changed (their records, labels, selection or order)"
        for name, digest in data.digests.items()
        if content["digests"].get(name) != digest
    ]


def _metadata(learner: Learner, data: RunData) -> dict[str, Any]:
    train_set = data.train_set
    return {
        "version": VERSION,
        "settings": learner.settings.to_dict(),
        "task": learner.task.name,
        "outputs": learner.task.outputs,
        "classes": list(train_set.classes),
        "value_names": list(train_set.manifest.value_names) if learner.task.form == "values" else [],
        "images": image_settings(train_set.manifest),
        "fields": [field.to_dict() for field in train_set.manifest.fields],
        "mean": list(learner.mean),
        "std": list(learner.std),
        "fingerprint": train_set.manifest.fingerprint,
        "samples": len(train_set),
        "digests": data.digests,
        **({"columns": data.columns.to_list()} if data.columns.parts else {}),
    }


def _describe_data(dataset: CachedDataset) -> dict[str, Any]:
    shown = {"resolution": dataset.resolution, "frequencies": dataset.frequencies}
    return {
        "cache": dataset.place,
        "variant": dataset.variant,
        **({} if dataset.resolution is None else shown),
        "samples": len(dataset),
        "digest": dataset.digest_without_columns,
    }


class BackgroundWriter:
    """Runs writes in a thread, one after another.

    After an error no other write begins, and the next call raises the error: the files are as if the process had been
    killed in that write.
    """

    def __init__(self) -> None:
        self._writes: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tpucache-write", daemon=True)

    def __enter__(self) -> BackgroundWriter:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._writes.put(None)
        self._thread.join()
        if error is None:
            self._raise()

    def submit(self, write: Callable[[], None]) -> None:
        """Let the thread call `write` after the writes that were submitted before.

        The data that `write` uses must not change until then.
        """
        self._raise()
        self._writes.put(write)

    def flush(self) -> None:
        self._writes.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            write = self._writes.get()
            try:
                if write is None:
                    return
                if self._error is None:
                    write()
            except BaseException as error:  # noqa: BLE001  # the main thread raises any error again
                self._error = error
            finally:
                self._writes.task_done()
