"""A small run that is stopped at a chosen moment, on any backend; what such runs leave behind can be compared."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpucache import CachedDataset
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training.device import Device
from tpucache.training.interrupt import StopRequest
from tpucache.training.loop import train
from tpucache.training.options import RunOptions
from tpucache.training.settings import TrainSettings

SETTINGS = TrainSettings(
    model="tiny_models:tiny",
    epochs=2,
    batch_size=16,
    optimizer="adamw",
    ema=0.9,
    clip=1.0,
    augment=AugmentSettings(flip=True, mixup=0.3),
)


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


class Moment:
    """Counts what a device has run, and does something once at the chosen count."""

    def __init__(self, device: Device, chosen: int = -1, action: Callable[[], None] = lambda: None) -> None:
        self.count, self._chosen, self._action = 0, chosen, action
        self._step_end = type(device).step_end.__get__(device)
        device.step_end = self._count  # type: ignore[method-assign]  # the device's one method that every batch passes

    @property
    def is_past(self) -> bool:
        return 0 < self._chosen <= self.count

    def _count(self) -> None:
        self._step_end()
        self.count += 1
        if self.count == self._chosen:
            self._action()


def run_once(cache: Path, run: Path, device: Device, **options: Any) -> None:
    """Train two epochs of two steps, each evaluated in two batches; resume what is there."""
    dataset = CachedDataset(cache)
    train_set, valid_set = dataset.select(range(40)), dataset.select(range(100, 120))
    train(run, SETTINGS, train_set, valid_set, device, RunOptions(resume=True, replay=False, **options))


def stop_once(cache: Path, run: Path, device: Device, kind: str, chosen: int) -> bool:
    """Train, and stop by a signal, a time limit or the death of the process; return whether it stopped."""

    def act() -> None:
        if kind == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "SIGKILL":
            raise Killed

    moment = Moment(device, chosen, act)
    stop = StopRequest(100, clock=lambda: 1000.0 if kind == "time limit" and moment.is_past else 0.0)
    try:
        run_once(cache, run, device, stop=stop)
    except (Killed, KeyboardInterrupt, Exception) as error:
        if type(error).__name__ not in {"Killed", "KeyboardInterrupt", "UnfinishedError"}:
            raise
        return True
    return False


def results(run: Path) -> dict[str, Any]:
    """Return the history, the best weights and the last state of a run."""
    best, last = (torch.load(run / name, weights_only=True) for name in ("best.pt", "last.pt"))
    return {"history": (run / "history.csv").read_bytes(), "best": best, "last": last}


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Return where two trees of values differ in any bit."""
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return [path]
        return [found for key in left for found in differences(left[key], right[key], f"{path}/{key}")]
    if isinstance(left, torch.Tensor):
        return [] if torch.equal(left, right) else [path]
    return [] if left == right else [path]
