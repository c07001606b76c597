"""Shows runs in TensorBoard, Weights & Biases and MLflow; each is imported only if it is asked for."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from tpucache.errors import DependencyError, TrainingError, UnfinishedError
from tpucache.store.files import write_atomically
from tpucache.strict_json import parse_json
from tpucache.training.run.history import Row, Watcher

TRACKERS: Final = ("tensorboard", "wandb", "mlflow")
#: The file in a run's folder with its ids at Weights & Biases and MLflow.
IDS_NAME: Final = "trackers.json"
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_IDS_BYTES: Final = 4096
#: MLflow takes at most 1,000 metrics and 100 parameters in a request, and cuts off long values of parameters.
_METRICS, _PARAMETERS, _VALUE = 500, 100, 500
_NOT_METRICS: Final = ("epoch", "step")

Rows = Sequence[tuple[int, dict[str, float]]]  # steps, each with its scalars
Outcome = Literal["FINISHED", "KILLED", "FAILED"]


@contextlib.contextmanager
def watch_with(names: Collection[str], settings: Mapping[str, Any], run: Path) -> Iterator[Sequence[Watcher]]:
    """Return a context with a watcher of the run for each of the trackers in `names`, which are some of TRACKERS.

    `settings` are shown with the run. At the end the watchers are closed with the outcome of the run. A resumed run
    continues the same runs in its trackers. Raises DependencyError for a tracker that is not installed, TrainingError
    for a tracker that cannot begin. If a tracker fails later, a warning says so and the run continues without it.
    """
    makers: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: TensorBoard(run / "tensorboard"),
        "wandb": lambda: Tracker("wandb", functools.partial(WandbRun, _imported("wandb"), run, settings)),
        "mlflow": lambda: Tracker("mlflow", functools.partial(MlflowRun, _imported("mlflow"), run, settings)),
    }
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(makers[name]()) for name in dict.fromkeys(names)]


class TensorBoard:
    """Writes scalars for TensorBoard: `train/loss` for each step, and the numbers of each epoch.

    The tags of an epoch's metrics begin with `valid/`, those of its other numbers with `epoch/`.
    """

    def __init__(self, folder: Path) -> None:
        """Take the folder to write to, in which nothing is written yet. Raises DependencyError without TensorBoard."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise DependencyError(
                f"TensorBoard cannot be imported: {error}. Run `pip install tensorboard`, or leave --tensorboard and "
                "--watch-with tensorboard out"
            ) from error
        self._make: Any = SummaryWriter
        self._folder = folder
        self._writer: Any = None
        self._has_failed = False

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        with self._forgiving():
            if self._writer is not None:
                self._writer.close()

    def losses(self, first: int, values: Sequence[float]) -> None:
        """Write the losses of consecutive steps from `first` on, counted from 0. TensorBoard's steps count from 1."""
        self._write(first, [(step, {"train/loss": value}) for step, value in enumerate(values, first + 1)])

    def epoch(self, row: Row) -> None:
        """Write an epoch's metrics and other numbers."""
        self._write(row["step"], [(row["step"], _tagged(row))])
        with self._forgiving():
            self._writer.flush()

    def _write(self, steps: int, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Write scalars: `rows` are pairs of a step and its scalars by tag.

        The first call discards scalars of steps after `steps`, which a killed run may have written.
        """
        with self._forgiving():
            self._writer = self._writer or self._make(str(self._folder), purge_step=steps + 1)
            for step, scalars in rows:
                for tag, value in scalars.items():
                    self._writer.add_scalar(tag, value, step)

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Return a context in which any error of TensorBoard only causes a warning, once: the run continues."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a full disk among others
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(f"TensorBoard failed, and may not show all of this run: {error}", stacklevel=3)


class Tracker:
    """Sends losses and epochs to a service; if the service fails, the run continues without it.

    The service begins with the first loss: a run that fails its checks leaves nothing in the service.
    """

    def __init__(self, name: str, make: Callable[[], WandbRun | MlflowRun]) -> None:
        """Take the name of the service, and the function that begins a run in it."""
        self._name, self._make = name, make
        self._service: WandbRun | MlflowRun | None = None
        self._has_failed = False

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._service is not None and not self._has_failed:
            is_stopped = kind is not None and issubclass(kind, (UnfinishedError, KeyboardInterrupt))
            outcome: Outcome = "FINISHED" if kind is None else "KILLED" if is_stopped else "FAILED"
            with self._forgiving():
                self._service.close(outcome)

    def losses(self, first: int, values: Sequence[float]) -> None:
        """Send the losses of consecutive steps from `first` on, counted from 0. The service's steps count from 1."""
        self._send([(step, {"train/loss": value}) for step, value in enumerate(values, first + 1)])

    def epoch(self, row: Row) -> None:
        """Send an epoch's metrics and other numbers."""
        self._send([(row["step"], _tagged(row))])

    def _send(self, rows: Rows) -> None:
        if self._has_failed:
            return
        if self._service is None:
            try:
                self._service = self._make()
            except Exception as error:
                raise TrainingError(
                    f"{self._name} cannot watch this run: {error}. Leave --watch-with {self._name} out, to train "
                    f"without {self._name}"
                ) from error
        with self._forgiving():
            self._service.send(rows)

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the run continues after any error of a service
            self._has_failed = True
            warnings.warn(f"{self._name} failed, and no longer watches this run: {error}", stacklevel=3)


class WandbRun:
    """A run of Weights & Biases, with its files in the folder of the run. It obeys WANDB_PROJECT and WANDB_MODE."""

    def __init__(self, wandb: Any, run: Path, settings: Mapping[str, Any]) -> None:
        known = _read_ids(run).get("wandb")
        self._run = wandb.init(
            dir=str(run), name=run.resolve().name, id=known, resume="allow" if known else None, config=dict(settings)
        )
        # W&B's own steps may only grow, but some losses are sent after the row of their epoch.
        self._run.define_metric("*", step_metric="step")
        _write_id(run, "wandb", self._run.id)

    def send(self, rows: Rows) -> None:
        """Send scalars, each with its step."""
        for step, scalars in rows:
            self._run.log({**scalars, "step": step})

    def close(self, outcome: Outcome) -> None:
        """Send the remaining scalars, and whether the run has failed."""
        self._run.finish(exit_code=int(outcome == "FAILED"))


class MlflowRun:
    """A run of MLflow, at MLFLOW_TRACKING_URI in the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, mlflow: Any, run: Path, settings: Mapping[str, Any]) -> None:
        known = _read_ids(run).get("mlflow")
        self._client, self._metric = mlflow.tracking.MlflowClient(), mlflow.entities.Metric
        self._end: Callable[[str], None] = mlflow.end_run
        name = None if known else run.resolve().name
        self._id: str = mlflow.start_run(run_id=known, run_name=name).info.run_id
        if not known:  # a parameter's value cannot be changed
            given = [mlflow.entities.Param(key, str(value)[:_VALUE]) for key, value in settings.items()]
            for at in range(0, len(given), _PARAMETERS):
                self._client.log_batch(self._id, params=given[at : at + _PARAMETERS])
        _write_id(run, "mlflow", self._id)

    def send(self, rows: Rows) -> None:
        """Send scalars, each with its step, many in one request."""
        now = int(time.time() * 1000)
        metrics = [self._metric(key, float(value), now, step) for step, each in rows for key, value in each.items()]
        for at in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[at : at + _METRICS])

    def close(self, outcome: Outcome) -> None:
        """End the run with this outcome."""
        self._end(outcome)


def _tagged(row: Row) -> dict[str, float]:
    return {
        name.replace("valid_", "valid/", 1) if name.startswith("valid_") else f"epoch/{name}": value
        for name, value in row.items()
        if name not in _NOT_METRICS
    }


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DependencyError(
            f"{name} cannot be imported: {error}. Run `pip install {name}`, or leave --watch-with {name} out"
        ) from error


def _read_ids(run: Path) -> dict[str, str]:
    """Return the id that each tracker ("wandb", "mlflow") gave to a run, from a file in the run's folder.

    Without the file, return {}. Raises TrainingError for a file that cannot be read or has other content.
    """
    path = run / IDS_NAME
    try:
        with path.open("rb") as file:
            found = parse_json(file.read(_MOST_IDS_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read: {error}. Delete it to begin new runs in the trackers") from error
    is_right = isinstance(found, dict) and all(isinstance(each, str) and _ID.fullmatch(each) for each in found.values())
    if not is_right:
        raise TrainingError(f"{path} holds no ids of runs: delete it to begin new runs in the trackers")
    return dict(found)


def _write_id(run: Path, name: str, value: str) -> None:
    path = run / IDS_NAME
    try:
        write_atomically(path, json.dumps({**_read_ids(run), name: str(value)}).encode() + b"\n")
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error}") from error
