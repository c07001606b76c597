"""Plain torch on the CPU: what the other backends are checked against."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch

from tpucache.training.device.base import Counters


class EagerDevice:
    """The host's processor; every operation has run when its call returns."""

    name = "eager"
    cores = 1

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._received_bytes = 0
        self._start = time.perf_counter()

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the batch itself: it is where it has to be."""
        self._received_bytes += batch.nbytes
        return batch

    def step_end(self) -> None:
        """Do nothing: the step has run."""

    def wait(self) -> None:
        """Do nothing: everything has run."""

    def autocast(self, enabled: bool) -> AbstractContextManager[object]:
        """Return torch's own context."""
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)

    def seed(self, seed: int) -> None:
        """Seed torch's default generator."""
        torch.manual_seed(seed)

    def counters(self) -> Counters:
        """Return no compiles, and all time since the start: the processor is never idle while it waits for itself."""
        return Counters(0, time.perf_counter() - self._start, self._received_bytes)
