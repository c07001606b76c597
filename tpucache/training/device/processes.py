"""The processes that train one model together: this one alone, all that torchrun has started, or one a host of a pod.

Each is a rank: it reads its slice of every global batch. Those of torchrun compute the gradients of their slice, and
DistributedDataParallel averages them; those of a pod run one program on the global batch. Either way all ranks take the
same steps. The main process, rank 0, alone writes files.
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
#: Returns a batch's loss, and the share of its targets that it is the mean over, None for all of them.
Loss = Callable[["DeviceBatch"], "tuple[torch.Tensor, torch.Tensor | None]"]
#: Returns the same, and is told whether the batch is the last one of a step.
SharedLoss = Callable[["DeviceBatch", bool], "tuple[torch.Tensor, torch.Tensor | None]"]

_joined: list[Processes] = []


class Processes:
    """This process alone: nothing is exchanged, and nothing costs anything.

    What is said of all processes below holds for one. Every process has to make the same calls in the same order.
    """

    rank = 0
    world_size = 1
    #: The number of this process among those of its host.
    local_rank = 0
    #: The number of the program that it runs: each its own, or all the same one, which then draws the same numbers.
    program = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.rank == 0

    def share(self, size: int) -> slice:
        """Return which of `size` consecutive rows are this process's: equally many, to within one, in rank order."""
        from tpucache.loading.sampler import rank_slice  # --help, which names the devices, needs no orders

        return rank_slice(0, size, self.rank, self.world_size)

    def largest(self, value: float) -> float:
        """Return the largest of all processes' values."""
        return value

    def largest_before(self) -> Callable[[float], float]:
        """Return a function that is given a value in every step, and never waits for a slower process.

        It returns the largest of the values that all processes gave it the time before, 0 the first time; of one
        process alone, the value that it is given.
        """
        return lambda value: value

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean over the processes of each of several values."""
        return list(values)

    def mean_on_device(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over the processes of a tensor, which stays on the device."""
        return value

    def gather(self, value: Result) -> list[Result]:
        """Return the values of all processes in rank order on the main process, and none on the others."""
        return [value]

    def on_main(self, call: Callable[[], Result]) -> Result:
        """Return on all processes what a call on the main one returns, or raise what it raises."""
        return call()

    def on_each_host(self, call: Callable[[], Result]) -> Result:
        """Return what a call returns that the first process of each host makes before the others of that host."""
        return call()

    def replicate(self, model: nn.Module, compute: Loss) -> SharedLoss:
        """Return a function that computes the loss, and whose backward pass averages gradients over the processes.

        It takes a batch, and whether it is the last one whose gradients are added up: they are averaged then. The model
        begins with the main process's weights.
        """
        return lambda batch, _: compute(batch)

    def roll(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """Return this process's part of a batch whose rows have moved by a number, at most the rows of a part."""
        return part.roll(rows, 0)

    def check_gradients(self, model: nn.Module) -> None:
        """Raise UsageError unless each parameter that learns got a gradient, where these are shared."""

    def share_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        """Take over the main process's values of a model's buffers."""

    def norms(self, model: nn.Module) -> nn.Module:
        """Return the model with norms that see the global batch, where there are such."""
        return model

    def explained(self) -> AbstractContextManager[object]:
        """Return a context that raises TrainingError when the connection to another process is lost."""
        return contextlib.nullcontext()


#: This process, where it has not joined others.
ALONE: Final = Processes()


def current() -> Processes:
    """Return the processes that this one has joined, or this one alone."""
    return _joined[0] if _joined else ALONE


def is_launched() -> bool:
    """Return whether torchrun has started this process, together with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def may_be_several(backend: str) -> bool:
    """Return whether this process may be one of several, which is known when its device is open."""
    return is_launched() or (backend == "xla" and os.environ.get("PJRT_DEVICE", "TPU") == "TPU")


def join(group: Callable[[], Processes]) -> Processes:
    """Return the processes that this one has joined; `group` joins them where it has joined none."""
    if not _joined:
        _joined.append(group())
    return current()
