"""Who waits for whom: the loop's steps timed, the first ones and their compiling left out."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Final

from tpucache.training.device import Device
from tpucache.training.feeder import Feeder

#: Steps that may compile: the first, and the second where the optimizer's state has just come to be.
WARMUP_STEPS: Final = 2


@dataclass(frozen=True)
class Pace:
    """How steps went after the warm-up: `waited` is the fraction of their time the loop was blocked on data."""

    steps: int
    images_per_second: float
    step_seconds: float
    waited: float
    compiles: int

    def to_dict(self) -> dict[str, Any]:
        """Return the pace as JSON values."""
        return asdict(self)


class PaceMeter:
    """Counts steps and their time between `resume` and `pause`, from the third step of the run on."""

    def __init__(self, device: Device, feeder: Feeder, batch_size: int) -> None:
        """Watch one feeder's loop."""
        self._device, self._feeder, self._batch_size = device, feeder, batch_size
        self._warm = WARMUP_STEPS
        self._steps, self._compiles = 0, 0
        self._seconds = self._waited = 0.0
        self._from: tuple[float, float] | None = None
        self._compiles_at_warm: int | None = None

    def step(self) -> None:
        """Count a step that has just been sent."""
        if self._warm:
            self._warm -= 1
            if not self._warm:
                self._device.wait()
                self._compiles_at_warm = self._device.counters().compiles
                self.resume()
            return
        self._steps += 1

    def resume(self) -> None:
        """Let time count, from now on."""
        if not self._warm:
            self._from = (time.perf_counter(), self._feeder.waited_seconds)

    def pause(self) -> None:
        """Wait for the device, and let time count no more."""
        self._device.wait()
        if self._from is not None:
            self._seconds += time.perf_counter() - self._from[0]
            self._waited += self._feeder.waited_seconds - self._from[1]
            self._from = None

    def pace(self) -> Pace:
        """Return what was counted so far."""
        since = self._compiles_at_warm
        compiles = 0 if since is None else self._device.counters().compiles - since
        seconds = self._seconds
        return Pace(
            steps=self._steps,
            images_per_second=self._steps * self._batch_size / seconds if seconds else 0.0,
            step_seconds=seconds / self._steps if self._steps else 0.0,
            waited=self._waited / seconds if seconds else 0.0,
            compiles=compiles,
        )
