"""Runs a command in several processes of this host, each a new Python, by torchrun's launcher."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tpucache import process
from tpucache.errors import TpucacheError, TrainingError, UnfinishedError, UsageError
from tpucache.machine import count_cores

#: Signals for which torch's launcher sets handlers of its own.
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
#: The error to raise for each exit status; for any other one a TrainingError.
_ERRORS: Final[Mapping[int, type[TpucacheError]]] = {2: UsageError, process.STOPPED: UnfinishedError}


def launch(arguments: Sequence[str], processes: int, began: float) -> None:
    """Run `python -m tpucache ARGUMENTS` in several processes of this host, and return when all have ended.

    The processes find each other as processes of torchrun do.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="tpucache-launch-") as folder, _environment(Path(folder), processes, began):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id="tpucache",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any port that is free
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        safe_path = ["-P"] if sys.flags.safe_path else []
        try:
            elastic_launch(config, sys.executable)(*safe_path, "-m", "tpucache", *arguments)
        except ChildFailedError as error:
            raise_first(Path(folder), {rank: failure.exitcode for rank, failure in error.failures.items()}, processes)
        except SignalException:  # all have ended
            raise_first(Path(folder), {}, processes)
            raise KeyboardInterrupt from None


@contextmanager
def _environment(folder: Path, processes: int, began: float) -> Iterator[None]:
    threads = max(1, int(count_cores().usable) // processes)
    given = {
        process.LAUNCHED: json.dumps({"folder": str(folder), "began": began, "parent": os.getpid()}),
        # Without it each process would have a thread for each core of the host.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    before = {name: os.environ.get(name) for name in given}
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    # The launcher's log is hidden: `raise_first` reports in one line which process has failed.
    log = logging.getLogger("torch.distributed.elastic")
    level = log.level
    log.setLevel(logging.CRITICAL)
    os.environ |= given
    try:
        yield
    finally:
        log.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def raise_first(folder: Path, statuses: Mapping[int, int], processes: int) -> None:
    """A process that a signal has killed counts as the first: the others fail because of it."""
    if killed := {rank: -status for rank, status in statuses.items() if status < 0}:  # the cause of other failures
        rank, number = next(iter(killed.items()))
        raise TrainingError(
            f"process {rank} of {processes} was ended by {_name(number)}: see the system's log (SIGKILL often means a "
            "lack of memory), and run the same command with --resume to continue"
        )
    if ends := [json.loads(path.read_text()) for path in folder.glob(process.END_PATTERN)]:
        first = min(ends, key=lambda end: end["time"])
        raise _ERRORS.get(first["status"], TrainingError)(first["message"])
    if statuses:
        rank, status = next(iter(statuses.items()))
        if status == process.STOPPED:  # before it could write its error
            raise UnfinishedError(process.INTERRUPTED)
        raise TrainingError(
            f"process {rank} of {processes} ended with status {status}: see its output above, and run the same "
            "command with --resume to continue"
        )


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
