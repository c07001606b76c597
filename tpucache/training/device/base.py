"""What a backend is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn


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

    def place(self, model: nn.Module) -> nn.Module:
        """Return a model with its weights on the device, laid out as the device computes fastest."""
        ...

    def to_layout(self, images: torch.Tensor) -> torch.Tensor:
        """Return images (batch, channels, height, width) on the device, laid out as the device computes fastest."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this step as every core has all of it, so that to read it takes no more of the device."""
        ...

    def step_begin(self, seed: int) -> None:
        """Begin a step whose random numbers come from `seed`; they are the same on any number of cores."""
        ...

    def preserve_rng(self) -> AbstractContextManager[object]:
        """Return a context after which random numbers, the host's torch's too, go on as if it had not been."""
        ...

    def step_end(self) -> None:
        """End a step: what was recorded since it began is sent to run."""
        ...

    def wait(self) -> None:
        """Return when everything sent has run."""
        ...

    def autocast(self, enabled: bool) -> AbstractContextManager[object]:
        """Return a context in which matrix products run in bfloat16, when enabled."""
        ...

    def counters(self) -> Counters:
        """Return the running totals."""
        ...

    def peak_bytes(self) -> int | None:
        """Return the most memory that was in use on the fullest core; None where it has no own or cannot tell."""
        ...

    def profile(self, folder: Path) -> AbstractContextManager[object]:
        """Return a context whose steps are traced into a folder."""
        ...
