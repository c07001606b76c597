"""The interface of a backend."""

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

    from tpucache.ondevice.resident import Table
    from tpucache.ondevice.slots import RecordSlots, Tile

#: Executions that may be under way at once: the device then always has a next one, and the loop never runs far ahead.
#: Further ahead, batches would pile up in the device's memory, and the loop would wait for data while the device works.
MOST_AHEAD: Final = 2


class Counters(NamedTuple):
    """Totals since the process began: graphs compiled, seconds executing, bytes received, seconds compiling.

    Seconds executing are those in which the device ran something, however many executions were under way.
    """

    compiles: int
    execute_seconds: float
    received_bytes: int
    compile_seconds: float = 0.0


class BusyTime:
    """Adds up the seconds in which a device ran something, from executions that may overlap.

    A device runs its executions one after another, but their times count from when each was sent: each adds the part of
    its interval that comes after the end of the one before it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._until = -math.inf

    def add(self, began: float, ended: float) -> None:
        """Take the next execution, by the times when it was sent and when it had run, in seconds of one clock."""
        self.seconds += max(0.0, ended - max(began, self._until))
        self._until = max(self._until, ended)


class Device(Protocol):
    """An accelerator, or all of a host's at once, behind one `torch.device`.

    `cores` are those of this host; `processes` are those that train with them.
    """

    name: str
    cores: int
    processes: Processes
    torch_device: torch.device
    #: Whether batches are sent faster from page-locked memory.
    pin_memory: bool
    #: Whether torch has optimizers there whose step is one kernel for many parameters.
    has_fused_optimizers: bool
    #: What it computes in where that is left to it, and whatever else it can, as `TrainSettings.precision` names them.
    precisions: Sequence[Precision]
    #: Whole tiles of its memory hold the records that stay there.
    tile: Tile

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        """Send a contiguous host batch, split over the cores along its first dimension. Safe in any thread.

        It may be on its way when this returns: compute with it after `receive`, or after `wait`. The host's memory may
        be reused when the host tensor is freed.
        """
        ...

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> Table:
        """Return memory that stays there, for the rows of these slots, of chunks like this one (which was put).

        Raises DeviceFullError where there is not as much.
        """
        ...

    def free_bytes(self) -> int | None:
        """Return how much memory is left, on all cores together; None where it is the host's or not reported."""
        ...

    def receive(self, batches: Iterable[torch.Tensor]) -> None:
        """Have what this thread computes from now on wait for batches that were put, without waiting here."""
        ...

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy a tensor to the host; return the function that waits for this copy alone and gives it."""
        ...

    def place(self, model: nn.Module) -> nn.Module:
        """Return a model with its weights in the memory layout that is fastest there."""
        ...

    def to_layout(self, images: torch.Tensor) -> torch.Tensor:
        """Return images (batch, channels, height, width) in the memory layout that is fastest there."""
        ...

    def fetch_rows(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy this process's rows of a tensor of this step, which has one for each row of the batch.

        Return the function that waits for the copy and gives it, after `step_end`.
        """
        ...

    def step_begin(self, seed: int) -> None:
        """Begin a step whose random numbers depend on `seed` only, not on the number of cores."""
        ...

    def preserve_rng(self) -> AbstractContextManager[object]:
        """Return a context that leaves the random numbers, also of torch on the host, as they were before it."""
        ...

    def step_end(self) -> None:
        """End a step: send what was recorded since it began, and wait until no more than MOST_AHEAD are left to run."""
        ...

    def wait(self) -> None:
        """Wait until everything that was sent has run."""
        ...

    def fast_products(self) -> AbstractContextManager[object]:
        """Return a context in which torch's settings are those that are fastest there; after it they are as before."""
        ...

    def autocast(self, enabled: bool, dtype: torch.dtype = ...) -> AbstractContextManager[object]:
        """Return a context in which matrix products run in a type, bfloat16 unless given, when enabled."""
        ...

    def counters(self) -> Counters:
        """Return the running totals."""
        ...

    def peak_bytes(self) -> int | None:
        """Return the most memory that was in use on the fullest core; None where it is the host's or not reported."""
        ...

    def profile(self, folder: Path) -> AbstractContextManager[object]:
        """Return a context whose steps are traced into a folder."""
        ...
