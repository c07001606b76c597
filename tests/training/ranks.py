"""What each process does that `torchrun ranks.py WHAT CACHE FOLDER` starts; FOLDER gets `rank-N.json`, its results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tpucache import CachedDataset
from tpucache.cli import main
from tpucache.errors import TrainingError
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training import pace
from tpucache.training.device import open_device
from tpucache.training.learner import Learner
from tpucache.training.loop import train
from tpucache.training.options import RunOptions
from tpucache.training.settings import TrainSettings

COMMON: dict[str, Any] = {
    "model": "tiny_models:layer_norm", "epochs": 3, "batch_size": 16, "accumulate": 2, "ema": 0.9, "clip": 1.0,
    "smoothing": 0.1, "augment": AugmentSettings(flip=True, shift=2, brightness=0.2, erase=0.2, mixup=0.3),
}  # fmt: skip
SETTINGS = {
    "sgd": TrainSettings(optimizer="sgd", lr=0.05, **COMMON),
    "adamw": TrainSettings(optimizer="adamw", lr=0.003, **COMMON),
}
NORMS = TrainSettings(model="tiny_models:tiny", epochs=2, batch_size=16, lr=0.05, ema=0.9)
STOPPED = (
    "train {cache} --run {folder}/stopped --backend torch --device cpu --valid 0.3 "
    "--model tiny_models:layer_norm --batch-size 16 --json"
)
VALID = [*range(0, 150, 5)]
TRAIN = sorted({*range(150)} - {*VALID})  # 7 batches, and some that are left over


def learn(cache: Path, run: Path, settings: TrainSettings, **options: Any) -> dict[str, Any]:
    """Train for 21 steps, each epoch another variant, evaluate after each epoch, and return the report."""
    train_set, valid_set = CachedDataset(cache, "epoch").select(TRAIN), CachedDataset(cache).select(VALID)
    options = {"replay": False, **options}
    device = open_device("torch", device="cpu")
    return train(run, settings, train_set, valid_set, device, RunOptions(**options)).to_dict()


@contextlib.contextmanager
def before_step(number: int, action: Callable[[], None]) -> Iterator[None]:
    """Do something before a step that is taken within the context."""
    taken, step = [0], Learner.step

    def counted(*arguments: Any) -> Any:
        taken[0] += 1
        if taken[0] == number:
            action()
        return step(*arguments)

    Learner.step = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Learner.step = step  # type: ignore[method-assign]


@contextlib.contextmanager
def recorded_reads() -> Iterator[list[tuple[int, int]]]:
    """Give a list that gets the epoch and the position of each sample that this process reads for training."""
    read, found = CachedDataset.read_into, []

    def recording(self: CachedDataset, buffer: Any, indices: Any, epoch: int, *others: Any) -> Any:
        if self.variant == "epoch":
            found.extend((epoch, int(index)) for index in indices)
        return read(self, buffer, indices, epoch, *others)

    CachedDataset.read_into = recording  # type: ignore[method-assign]
    try:
        yield found
    finally:
        CachedDataset.read_into = read  # type: ignore[method-assign]


@contextlib.contextmanager
def counted_broadcasts() -> Iterator[list[int]]:
    """Give a list that gets the size of each tensor that is broadcast from device to device."""
    broadcast, sizes = dist.broadcast, list[int]()

    def counting(tensor: Any, *arguments: Any, **named: Any) -> Any:
        sizes.append(tensor.numel())
        return broadcast(tensor, *arguments, **named)

    with mock.patch.object(dist, "broadcast", counting):
        yield sizes


def signal_one(number: int, kind: signal.Signals) -> contextlib.AbstractContextManager[None]:
    """Give a context in which the second process gets a signal before a step."""
    return before_step(number, lambda: os.kill(os.getpid(), kind) if os.environ["RANK"] == "1" else None)


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the TrainingError that a call raises."""
    try:
        call()
    except TrainingError as error:
        return str(error)
    return ""


def two(cache: Path, folder: Path, keep: Callable[..., None]) -> None:
    """Learn with both optimizers; fail to save; diverge; stop by a signal to one process; lose that process."""
    pace.REPLAY_SECONDS = 0.0  # the few steps that are replayed at least are enough
    keep(sgd=learn(cache, folder / "sgd", SETTINGS["sgd"], replay=True))
    keep(adamw=learn(cache, folder / "adamw", SETTINGS["adamw"]))
    with counted_broadcasts() as sizes:
        keep(norms=learn(cache, folder / "norms", NORMS), broadcasts=sizes)
    wild = TrainSettings(model="tiny_models:layer_norm", batch_size=16, lr=1e30)
    with mock.patch.object(Learner, "checked_state", side_effect=TrainingError("not to be saved")):
        keep(unsaved=error_of(lambda: learn(cache, folder / "unsaved", SETTINGS["sgd"], checkpoint_every=2)))
    keep(diverged=error_of(lambda: learn(cache, folder / "diverged", wild)))
    with signal_one(6, signal.SIGTERM):
        keep(stopped=main([word.format(cache=cache, folder=folder) for word in STOPPED.split()]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when it notices that a process has ended
    with signal_one(12, signal.SIGKILL):
        keep(lost=error_of(lambda: learn(cache, folder / "killed", SETTINGS["adamw"], checkpoint_every=3)))


def four(cache: Path, folder: Path, keep: Callable[..., None]) -> None:
    """Continue the run that lost a process."""
    with recorded_reads() as reads:
        keep(resumed=learn(cache, folder / "killed", SETTINGS["adamw"], resume=True), reads=reads)


def run(what: Callable[..., None], cache: Path, folder: Path) -> None:
    """Run all of it, and write the results so far whenever there are new ones; end when it hangs."""
    signal.alarm(240)
    results: dict[str, Any] = {}

    def keep(**found: Any) -> None:
        results.update(found)
        (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(results))

    what(cache, folder, keep)


if __name__ == "__main__":
    what, cache, folder = sys.argv[1:]
    run({"two": two, "four": four}[what], Path(cache), Path(folder))
