"""What each of two processes does that play the hosts of a TPU pod; FOLDER gets `host-N.json`, its results.

XLA's CPU client knows one process only. So each process has the cores of both here and runs the whole program, as the
hosts of a pod do; what it sends goes to the other one, too, by files, so that both have the global batch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from patience import PATIENCE
from ranks import COMMON, TRAIN, before_step

from tpucache import CachedDataset
from tpucache.cli import main
from tpucache.errors import TpucacheError, UsageError
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training import feed, pace
from tpucache.training.device import open_device
from tpucache.training.loop import train
from tpucache.training.options import RunOptions
from tpucache.training.settings import TrainSettings

#: As many as make another batch for one host than for the other one.
VALID = [*range(0, 132, 4)]
MIXED = TrainSettings(optimizer="sgd", lr=0.05, **{**COMMON, "epochs": 2})
#: Without what depends on the order of the rows of a batch.
PLAIN = replace(MIXED, epochs=1, optimizer="adamw", lr=0.003, augment=AugmentSettings(flip=True, shift=2))
#: With random numbers that are drawn on the device.
DROPPING = replace(MIXED, model="tiny_models:dropping")
COMMAND = (
    "train {cache} --run {folder}/{run} --backend xla --cores {cores} --valid 0.3 --model tiny_models:layer_norm "
    "--epochs 2 --batch-size 16 --json"
)
PREDICT = (
    "predict {folder}/{run} {cache} -o {folder}/predictions.csv --trust tiny_models:layer_norm --backend xla "
    "--cores {cores}"
)

_thread = threading.local()
_feeders = itertools.count()


class Exchange:
    """Sends the rows of both hosts to all cores of this process, in the order of the hosts or the other way round."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Exchange them in a folder."""
        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.spmd as xs

        self.folder, self.rank, self.order = folder, rank, (0, 1)
        self._send, self._spec = xm.send_cpu_data_to_device, xs.ShardingSpec
        self._sent: Counter[object] = Counter()

    def send(self, batches: list[torch.Tensor], device: Any, spec: Any) -> Any:
        """Do what `send_cpu_data_to_device` does with a host's rows of a batch."""
        if not spec.minibatch:
            raise AssertionError("a host sends its rows of the batch, not all of them")
        (rows,) = batches
        channel = getattr(_thread, "channel", "main")
        number = self._sent[channel]
        self._sent[channel] += 1
        name = f"{channel}-{number}"
        np.save(self.folder / f"{name}-{self.rank}-part", rows.numpy())
        (self.folder / f"{name}-{self.rank}-part.npy").rename(self.folder / f"{name}-{self.rank}.npy")
        both = torch.cat([torch.from_numpy(self._wait(f"{name}-{rank}.npy")) for rank in self.order])
        return self._send([both], device, self._spec(spec.mesh, spec.partition_spec))

    def _wait(self, name: str) -> Any:
        end = time.monotonic() + PATIENCE
        while not (self.folder / name).exists():
            if time.monotonic() > end:
                raise TpucacheError(f"the other host does not send {name}")
            time.sleep(0.001)
        return np.load(self.folder / name)


class Channel:
    """A device whose batches go by a channel: those of one Feeder, which both hosts open as the same one of all."""

    def __init__(self, device: Any, number: int) -> None:
        """Take the device."""
        self._device, self._number = device, number

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        """Send a batch."""
        _thread.channel = self._number
        sent: torch.Tensor = self._device.put(batch)
        return sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@contextlib.contextmanager
def a_pod(folder: Path, rank: int) -> Iterator[Exchange]:
    """Play a host of a pod of two with a core each."""
    folder.mkdir(exist_ok=True)
    exchange, begin = Exchange(folder, rank), feed.Feeder.__init__

    def numbered(self: Any, batches: Any, device: Any, *others: Any, **named: Any) -> None:
        begin(self, batches, Channel(device, next(_feeders)), *others, **named)

    with (
        mock.patch("torch_xla.runtime.process_count", return_value=2),
        mock.patch("torch_xla.runtime.process_index", return_value=rank),
        mock.patch("torch_xla.runtime.addressable_runtime_device_count", return_value=1),
        mock.patch("torch_xla.core.xla_model.send_cpu_data_to_device", exchange.send),
        mock.patch.object(feed.Feeder, "__init__", numbered),
        mock.patch("tpucache.training.device.base.may_be_several", return_value=True),
    ):
        yield exchange


def learn(cache: Path, run: Path, settings: TrainSettings, cores: int, backend: str = "xla") -> dict[str, Any]:
    """Train with evaluations, and return the report."""
    train_set, valid_set = CachedDataset(cache, "epoch").select(TRAIN), CachedDataset(cache).select(VALID)
    device = open_device(backend, cores, "auto" if backend == "xla" else "cpu")
    return train(run, settings, train_set, valid_set, device, RunOptions(replay=False)).to_dict()


def own_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a loss of one number for a batch."""
    return torch.nn.functional.cross_entropy(outputs, labels)


def refusal(call: Callable[[], object]) -> str:
    """Return the message of the UsageError that a call raises."""
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def programs() -> tuple[int, int]:
    """Return how many programs this process has compiled, and how many it has run."""
    import torch_xla.debug.metrics as met

    def count(name: str) -> int:
        return (met.metric_data(name) or (0,))[0]

    return count("CompileTime"), count("ExecuteReplicatedTime") + count("ExecuteTime")


def command(words: str, cache: Path, folder: Path, cores: int, run: str = "stopped") -> int:
    """Run a command of tpucache; return its exit status."""
    return main([word.format(cache=cache, folder=folder, cores=cores, run=run) for word in words.split()])


def alone(cache: Path, folder: Path) -> dict[str, Any]:
    """Learn with both cores of one host, once without a stop."""
    found: dict[str, Any] = {"plain": learn(cache, folder / "plain", PLAIN, 2)}
    found["dropping"] = learn(cache, folder / "dropping", DROPPING, 2)
    command(COMMAND, cache, folder, 2)
    command(PREDICT, cache, folder, 2)
    return found


def short(cache: Path, folder: Path) -> dict[str, Any]:
    """Learn once as one of two hosts, which are refused what they cannot do."""
    with a_pod(folder / "sent", int(os.environ["HOST"])):
        return {
            "two_cores": refusal(lambda: open_device("xla", 2)),
            "own_loss": refusal(lambda: learn(cache, folder / "own", replace(MIXED, loss="hosts:own_loss"), 1)),
            "mixed": learn(cache, folder / "mixed", MIXED, 1),
        }


def host(cache: Path, folder: Path) -> dict[str, Any]:
    """Learn as one of two hosts; stop by a signal to one of them, continue, and predict."""
    rank = int(os.environ["HOST"])
    with a_pod(folder / "sent", rank) as exchange:
        exchange.order = (1, 0)
        found: dict[str, Any] = {"plain": learn(cache, folder / "plain", PLAIN, 1)}
        exchange.order = (0, 1)
        found["dropping"] = learn(cache, folder / "dropping", DROPPING, 1)
        with before_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM) if rank else None):
            found["stopped"] = command(COMMAND, cache, folder, 1)
        found["resumed"] = command(COMMAND + " --resume", cache, folder, 1)
        found["predicted"] = command(PREDICT, cache, folder, 1)
        found["programs"] = programs()
    return found


if __name__ == "__main__":
    signal.alarm(240)
    pace.REPLAY_SECONDS = 0.0  # the few steps that are replayed at least are enough
    what, cache, folder = sys.argv[1:]
    results = {"short": short, "alone": alone, "host": host}[what](Path(cache), Path(folder))
    Path(folder, f"host-{os.environ['HOST']}.json").write_text(json.dumps(results))
