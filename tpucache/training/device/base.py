"""The interface of a device, which each backend implements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from tpucache.training.device.processes import Processes
from tpucache.training.settings import Precision

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tpucache.ondevice.resident import ResidentTable
    from tpucache.ondevice.slots import RecordSlots, Tile

#: Executions that may be queued on the device at once. With two, the device always has a next one. With more, batches
#: would fill the device's memory, and the loop would wait for data although the device still has work.
MOST_AHEAD: Final = 2


class Counters(NamedTuple):
    """Totals of a device.

    `compiles` is the number of graphs compiled, and `compile_seconds` the time that XLA took for them.
    `execute_seconds` is the time in which the device ran anything; executions that overlap count once.
    `received_bytes` is the number of bytes sent to the device.
    """

    compiles: int
    execute_seconds: float
    received_bytes: int
    compile_seconds: float = 0.0


class BusyTime:
    """Adds up the seconds in which a device ran something, from executions that may overlap.

    A device runs one execution after another, but an execution's time begins when it was sent. So each execution adds
    only the part of its interval after the end of the execution before it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._until = -math.inf

    def add(self, began: float, ended: float) -> None:
        """Add the next execution: when it was sent and when it ended, in seconds of one clock."""
        self.seconds += max(0.0, ended - max(began, self._until))
        self._until = max(self._until, ended)


class Device(Protocol):
    """An accelerator, or all accelerators of a host, behind one `torch.device`.

    `cores` is the number of cores of this host; `processes` are the processes that train together.
    """

    name: str
    cores: int
    processes: Processes
    torch_device: torch.device
    #: Whether batches are sent faster from page-locked memory.
    pin_memory: bool
    #: Whether torch's optimizers have a fused step on this device: one kernel for many parameters.
    has_fused_optimizers: bool
    #: Precisions of `TrainSettings` in which the device can compute; the first one is the default.
    precisions: Sequence[Precision]
    #: The unit in which the device's memory is allocated: each resident record takes a whole number of tiles.
    tile: Tile

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        """Send a contiguous host batch, split over the cores along its first dimension; return it on the device.

        Any thread may call this. The copy may still be under way when this returns: call `receive` or `wait` before
        computing with the result. The host's memory may be reused when the host tensor is freed.
        """
        ...

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> ResidentTable:
        """Return a table in the device's memory with a row for each row of `slots`.

        Records are written to it in chunks of the dtype and shape of `chunk`, which is on the device. Raises
        DeviceFullError if the device has not enough memory.
        """
        ...

    def free_bytes(self) -> int | None:
        """Return the free memory of all cores together, in bytes.

        The result is None if the device uses the host's memory, or does not report its memory.
        """
        ...

    def receive(self, batches: Iterable[torch.Tensor]) -> None:
        """Let the computations that follow in this thread wait for batches that were put; return without waiting."""
        ...

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy a tensor to the host; return a function that waits for this copy only, and returns the copy."""
        ...

    def place(self, model: nn.Module) -> nn.Module:
        """Return a model whose weights are on the device, in the memory layout that is fastest there."""
        ...

    def to_layout(self, images: torch.Tensor) -> torch.Tensor:
        """Return images (batch, channels, height, width) in the memory layout that is fastest on the device."""
        ...

    def fetch_rows(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy this process's rows of a tensor that has one row for each sample of the step's batch.

        Return a function that waits for the copy and returns it; call that function after `step_end`.
        """
        ...

    def step_begin(self, seed: int) -> None:
        """Begin a step whose random numbers depend on `seed` only, not on the number of cores."""
        ...

    def preserve_rng(self) -> AbstractContextManager[object]:
        """Return a context after which the device's and torch's random number generators are as before."""
        ...

    def step_end(self) -> None:
        """End a step: send the recorded operations, and wait until no more than MOST_AHEAD executions are queued."""
        ...

    def wait(self) -> None:
        """Wait until all operations that were sent have run."""
        ...

    def fast_products(self) -> AbstractContextManager[object]:
        """Return a context with torch's fastest settings for matrix multiplications on this device.

        After the context, torch has its earlier settings.
        """
        ...

    def autocast(self, enabled: bool, dtype: torch.dtype = ...) -> AbstractContextManager[object]:
        """Return a context in which, if enabled, matrix multiplications run in `dtype`, by default bfloat16."""
        ...

    def counters(self) -> Counters:
        """Return the device's totals so far."""
        ...

    def peak_bytes(self) -> int | None:
        """Return the peak memory of the fullest core, in bytes.

        The result is None if the device uses the host's memory, or does not report its memory.
        """
        ...

    def profile(self, folder: Path) -> AbstractContextManager[object]:
        """Return a context in which steps are traced; the trace is written to `folder`."""
        ...
