"""Plain torch on the CPU: what the other devices are checked against."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from tpucache.training.device.base import Counters


class CpuDevice:
    """The host's processor; every operation has run when its call returns."""

    name = "torch"
    cores = 1

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._received_bytes = 0
        self._began: float | None = None
        self._execute_seconds = 0.0

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the batch itself: it is on the device already."""
        self._received_bytes += batch.nbytes
        return batch

    def place(self, model: nn.Module) -> nn.Module:
        """Return the model with channels last: a step of resnet9 takes 0.81 of the time."""
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]  # torch: 4-d only

    def to_layout(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images with channels last."""
        return images.contiguous(memory_format=torch.channels_last)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor: there is one core."""
        return tensor

    def step_begin(self, seed: int) -> None:
        """Seed torch's default generator; what is computed from now on to `step_end` is execution."""
        torch.manual_seed(seed)
        if self._began is None:
            self._began = time.perf_counter()

    def preserve_rng(self) -> AbstractContextManager[object]:
        """Keep torch's default generator."""
        return torch.random.fork_rng(devices=())

    def step_end(self) -> None:
        """Count the time of the steps since the last call: they have run."""
        if self._began is not None:
            self._execute_seconds += time.perf_counter() - self._began
            self._began = None

    def wait(self) -> None:
        """Do nothing: everything has run."""

    def autocast(self, enabled: bool) -> AbstractContextManager[object]:
        """Return torch's own context."""
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)

    def counters(self) -> Counters:
        """Return no compiles, and the time between the steps' beginnings and ends."""
        return Counters(0, self._execute_seconds, self._received_bytes)

    def peak_bytes(self) -> None:
        """Return None: the memory is the host's."""

    @contextlib.contextmanager
    def profile(self, folder: Path) -> Iterator[None]:
        """Trace with torch's own profiler, into `trace.json` for Perfetto or chrome://tracing."""
        with torch.profiler.profile() as profiler:
            yield
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json"))
