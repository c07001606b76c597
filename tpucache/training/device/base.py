"""What a backend is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch


class Counters(NamedTuple):
    """What a backend has done since the process began: graphs compiled, seconds executing, bytes received."""

    compiles: int
    execute_seconds: float
    received_bytes: int


class Device(Protocol):
    """An accelerator, or all of a host's at once, behind one `torch.device`."""

    name: str
    cores: int
    torch_device: torch.device

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        """Send a contiguous host batch, split over the cores along its first dimension. Safe in any thread.

        When it returns, or at the latest when the host tensor dies, the host's memory may be used again.
        """
        ...

    def step_end(self) -> None:
        """End a step: what was recorded since the last one is sent to run."""
        ...

    def wait(self) -> None:
        """Return when everything sent has run."""
        ...

    def autocast(self, enabled: bool) -> AbstractContextManager[object]:
        """Return a context in which matrix products run in bfloat16, when enabled."""
        ...

    def seed(self, seed: int) -> None:
        """Seed the device's random numbers; the same on any number of cores."""
        ...

    def counters(self) -> Counters:
        """Return the running totals."""
        ...
