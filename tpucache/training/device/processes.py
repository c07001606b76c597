"""The processes that train one model together: this one alone, those of torchrun, or one on each host of a pod.

Each process has a rank, and reads its slice of every global batch. Processes of torchrun compute the gradients of their
slices, and DistributedDataParallel averages the gradients. Processes of a pod run one program on the global batch.
Either way all processes take the same steps. Only the main process, rank 0, writes files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tpucache.training.device.tensors import DeviceBatch

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
        """Whether this is the process that writes files and shows progress."""
        return self.rank == 0

    def share(self, size: int) -> slice:
        """Return which of `size` consecutive rows belong to this process.

        The shares are in rank order, and their sizes differ by at most one row.
        """
        from tpucache.loading.sampler import rank_slice  # --help imports this file, and must be fast

        return rank_slice(0, size, self.rank, self.world_size)

    def largest(self, value: float) -> float:
        """Return the largest of all processes' values."""
        return value

    def largest_before(self) -> Callable[[float], float]:
        """Return a function that exchanges a number, and returns the largest one of the call before.

        That is the largest of all processes' numbers, and 0 in the first call. So no process waits for one that has not
        made the present call yet. With one process the function returns its argument.
        """
        return lambda value: value

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return each value's mean over the processes."""
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
        """Return a function that computes the loss, and whose backward pass averages gradients over the processes.

        The function takes a part of a step's batch, and whether this is the last part: only then are the accumulated
        gradients averaged. All processes begin with the main process's weights.
        """
        return lambda batch, _: compute(batch)

    def roll(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """Return this process's part of a batch after `torch.roll` of the global batch by `rows` rows.

        `rows` is at most the number of rows of a part.
        """
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
    """Return the group of processes that this process has joined, or else `ALONE`."""
    return _joined[0] if _joined else ALONE


def is_launched() -> bool:
    """Return whether torchrun has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def may_be_several(backend: str) -> bool:
    """Return whether this process may be one of several processes; only an opened device knows for sure."""
    return is_launched() or (backend == "xla" and os.environ.get("PJRT_DEVICE", "TPU") == "TPU")


def join(group: Callable[[], Processes]) -> Processes:
    """Return the processes that this process has joined; if it has joined none, call `group`, which joins them."""
    if not _joined:
        _joined.append(group())
    return current()
