"""The interface of a device, batches on it, and the processes that train one model together."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from tpucache.training.settings import Precision

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tpucache.ondevice.resident import RecordBatch, RecordSlots, Resident, Tile

Result = TypeVar("Result")
#: Returns a batch's mean loss, and the share of its targets that count in the mean; None where all count.
Loss = Callable[["DeviceBatch"], "tuple[torch.Tensor, torch.Tensor | None]"]
#: Like Loss, with a second argument that says whether the batch is the last part of a step.
SharedLoss = Callable[["DeviceBatch", bool], "tuple[torch.Tensor, torch.Tensor | None]"]

_joined: list[Processes] = []


class Processes:
    """A group of this process alone: its methods exchange nothing, and cost nothing.

    The docstrings of the methods describe a group of several processes, which all make the same calls in the same
    order.
    """

    rank = 0
    world_size = 1
    #: The number of this process among those of its host.
    local_rank = 0
    #: The number of this process's program. Processes with the same program draw the same random numbers.
    program = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, size: int) -> slice:
        """Return which of `size` consecutive rows belong to this process."""
        from tpucache.loading.order import rank_slice  # --help imports this file, and must be fast

        return rank_slice(0, size, self.rank, self.world_size)

    def largest(self, value: float) -> float:
        return value

    def largest_before(self) -> Callable[[float], float]:
        """Return a function that exchanges a number and returns the largest of the call before: no process waits."""
        return lambda value: value

    def mean(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def mean_on_device(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor's mean over the processes; it stays on the device."""
        return value

    def gather(self, value: Result) -> list[Result]:
        """Return the values of all processes in rank order on the main process, and [] on all other processes."""
        return [value]

    def on_main(self, call: Callable[[], Result]) -> Result:
        """Call a function on the main process; return its result, or raise its error, on all processes."""
        return call()

    def on_each_host(self, call: Callable[[], Result]) -> Result:
        """Call a function on the first process of each host, then on the host's other processes; return its result."""
        return call()

    def replicate(self, model: nn.Module, compute: Loss) -> SharedLoss:
        """Return a loss whose backward pass averages gradients over the processes, after the last part of a step."""
        return lambda batch, _: compute(batch)

    def roll(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """Return this process's part of a batch after `torch.roll` of the global batch by `rows` rows."""
        return part.roll(rows, 0)

    def check_gradients(self, model: nn.Module) -> None:
        """Raise UsageError if gradients are averaged over processes and a learned parameter has no gradient."""

    def share_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        """Overwrite a model's buffers with the main process's values."""

    def norms(self, model: nn.Module) -> nn.Module:
        """Return the model with normalisation layers that use the global batch's statistics, if torch has them."""
        return model

    def explained(self) -> AbstractContextManager[object]:
        """Return a context that raises TrainingError when the connection to another process is lost."""
        return contextlib.nullcontext()


#: This process alone.
ALONE: Final = Processes()


def current() -> Processes:
    return _joined[0] if _joined else ALONE


def is_launched() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def may_be_several(backend: str) -> bool:
    """Return whether this process may be one of several processes; only an opened device knows for sure."""
    return is_launched() or (backend == "xla" and os.environ.get("PJRT_DEVICE", "TPU") == "TPU")


def join(group: Callable[[], Processes]) -> Processes:
    """Return the processes that this process has joined; if it has joined none, call `group`, which joins them."""
    if not _joined:
        _joined.append(group())
    return current()


#: Executions that may be queued on the device at once. With two, the device always has a next one. With more, batches
#: would fill the device's memory, and the loop would wait for data although the device still has work.
MOST_AHEAD: Final = 2


class Counters(NamedTuple):
    """Totals of a device. Executions that overlap count once in `execute_seconds`."""

    compiles: int
    execute_seconds: float
    received_bytes: int
    compile_seconds: float = 0.0


class BusyTime:
    """Adds up the seconds in which a device ran something, from executions that may overlap.

    An execution's time begins when it was sent, so each adds only the part after the end of the one before it.
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

    def put_all(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send batches of one shape and dtype, in one transfer if the device can do that; see `put`."""
        ...

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> Any:
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


@dataclass(frozen=True)
class ResidentRows:
    """A batch whose records are rows of `resident`, a table in the device's memory.

    `sent` has the numbers of these rows, and the records to write to them first.
    """

    resident: Resident
    sent: RecordBatch

    def receive(self, written: Callable[[], None]) -> Any:
        """Write the records in `sent` to their rows; `written` and the result are as in `Resident.receive_or_read`."""
        return self.resident.receive_or_read(self.sent, written)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that were sent: the row numbers, and the chunks of records with their numbers."""
        sent = [self.sent.slots]
        for _, number, fields in self.sent.uploads:
            sent += [number, *fields.values()]
        return sent


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on the device.

    `fields` are the records' fields: images are uint8 (batch, height, width, channels), or packed (batch, n). `labels`
    is (batch,) or (batch, m). `draws` are the batch's random numbers (batch, n), if there are any.

    If records stay on the device, `fields` is empty, `rows` says which rows they are in, and `labels` are these rows'
    numbers, int32 (batch,). `gathered` returns the batch with its fields and labels.
    """

    fields: Mapping[str, torch.Tensor]
    labels: torch.Tensor
    draws: torch.Tensor | None = None
    rows: ResidentRows | None = None

    def gathered(self) -> DeviceBatch:
        """Return the batch with its fields and labels.

        If the records stay on the device, they are copied from their rows, as a part of the step's graph.
        """
        if self.rows is None:
            return self
        from tpucache.store.fields import LABEL  # --help imports this file, and must be fast

        fields = self.rows.resident.take(self.rows.sent.slots)
        labels = fields.pop(LABEL)
        return DeviceBatch(fields, labels, self.draws)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that were sent for the batch."""
        if self.rows is not None:
            return [*self.rows.tensors, *([] if self.draws is None else [self.draws])]
        return [*self.fields.values(), self.labels, *([] if self.draws is None else [self.draws])]

    @property
    def images(self) -> torch.Tensor:
        """The field `image`."""
        from tpucache.store.fields import IMAGE

        return self.fields[IMAGE]
