"""Communication between the processes of a torch process group. Only this file and `launch` import torch.distributed.

HostGroup            one process on each host, all running one program: they exchange values in the hosts' memory
    ProcessGroup     the processes of torchrun, each with its own program: they exchange gradients, too
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn

from tpucache import progress
from tpucache.errors import TpucacheError, TrainingError, UsageError
from tpucache.training.device.base import Loss, Processes, Result, SharedLoss, current, is_launched, join

if TYPE_CHECKING:
    from tpucache.training.device.base import DeviceBatch

#: The backend of torch.distributed for each type of device.
_EXCHANGES: Final = {"cpu": "gloo", "cuda": "nccl", "tpu": "tpu_dist"}
#: Words in torch's errors about lost connections.
_CONNECTIONS: Final = ("gloo", "nccl", "connection", "tpu_dist")
#: How long a process waits for another process, which may be copying a cache. No process waits for one that has died,
#: because the connections of that one are closed.
_PATIENCE: Final = timedelta(days=1)
_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_log: Final = logging.getLogger("tpucache")


def join_hosts(rank: int, hosts: int, address: str) -> Processes:
    """Join the processes of a pod's hosts at "HOST:PORT", where the first process listens; return the group."""
    return join(lambda: HostGroup(rank, hosts, address))


def open_processes(device: str) -> Processes:
    """Join the processes that torchrun has started, if any, for devices of this type; return the group."""
    return join(lambda: ProcessGroup(device)) if is_launched() else current()


class HostGroup(Processes):
    """A group of processes, one on each host, that together run one program on the devices of all hosts.

    They exchange values in host memory.
    """

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        """Join the other processes at "HOST:PORT", where the first process listens, unless this was done before."""
        with _stdout_to_stderr():
            if not dist.is_initialized():
                dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=world_size)
                atexit.register(dist.destroy_process_group)
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._begin()

    def _begin(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if not self.is_main:
            progress.hide()
            _log.setLevel(logging.ERROR)  # the main process logs the same warnings

    def largest(self, value: float) -> float:
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def largest_before(self) -> Callable[[float], float]:
        begun: list[tuple[Any, torch.Tensor]] = []

        def exchange(value: float) -> float:
            values = torch.tensor([value], dtype=torch.float64)
            with self.explained():
                begun.append((dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True), values))
                if len(begun) == 1:
                    return 0.0
                work, largest = begun.pop(0)
                work.wait()
            return float(largest)

        return exchange

    def mean(self, values: Sequence[float]) -> list[float]:
        return [total / self.world_size for total in self._reduce(values, dist.ReduceOp.SUM)]

    def gather(self, value: Result) -> list[Result]:
        found: list[Any] | None = [None] * self.world_size if self.is_main else None
        with self.explained():
            dist.gather_object(value, found, dst=0, group=self._group)
        return found or []

    def on_main(self, call: Callable[[], Result]) -> Result:
        result, error = _attempt(call) if self.is_main else (None, None)
        sent = [(result, _portable(error))]
        with self.explained():
            dist.broadcast_object_list(sent, src=0, group=self._group)
        if error is not None:
            raise error
        value, failure = sent[0]
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]  # None only after an error

    def on_each_host(self, call: Callable[[], Result]) -> Result:
        # If any process fails, all processes raise an error.
        result: Result | None = None
        for is_first in (True, False):
            error = None
            if (self.local_rank == 0) == is_first:
                result, error = _attempt(call)
            failures: list[Exception | None] = [None] * self.world_size
            with self.explained():
                dist.all_gather_object(failures, _portable(error), group=self._group)
            for failure in (error, *failures):
                if failure is not None:
                    raise failure
        return result  # type: ignore[return-value]  # each process has called

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not any(name in str(error).lower() for name in _CONNECTIONS):
                raise
            raise TrainingError(
                f"another process of the run has ended, so that process {self.rank} of {self.world_size} ends as well: "
                "see the output of the other process, and run the same command with --resume to continue"
            ) from error

    def _reduce(self, values: Sequence[float], how: Any) -> list[float]:
        if not values:
            return []
        reduced = torch.tensor(values, dtype=torch.float64)
        with self.explained():
            dist.all_reduce(reduced, how, group=self._group)
        found: list[float] = reduced.tolist()
        return found


class ProcessGroup(HostGroup):
    """All processes of a torch process group, on devices of one type, each with its own program."""

    def __init__(self, device: str) -> None:
        """Join the processes that torchrun has started, unless the program has joined them already."""
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._device = device
        with _stdout_to_stderr():
            if not dist.is_initialized():
                if device != "cpu":
                    _take_device(getattr(torch, device), device, self.local_rank)
                dist.init_process_group(_EXCHANGES[device], timeout=_PATIENCE if device == "cpu" else None)
                atexit.register(dist.destroy_process_group)
            is_gloo = dist.get_backend() == "gloo"
            # Values in the hosts' memory are exchanged by gloo, without waiting for the device.
            self._group = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._begin()
        self.program = self.rank

    def mean_on_device(self, value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        with self.explained():
            dist.all_reduce(total)
        return total / self.world_size

    def replicate(self, model: nn.Module, compute: Loss) -> SharedLoss:
        # The loss is wrapped, not the model, so that the model's class and the names of its weights stay the
        # same.
        with self.explained():
            parallel = nn.parallel.DistributedDataParallel(_Loss(model, compute), broadcast_buffers=False)

        def loss(batch: DeviceBatch, is_last: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
            with contextlib.nullcontext() if is_last else parallel.no_sync():
                found: tuple[torch.Tensor, torch.Tensor | None] = parallel(batch)
            return found

        return loss

    def roll(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        last = part[-rows:].contiguous()
        all_last = [torch.empty_like(last) for _ in range(self.world_size)]
        with self.explained():
            dist.all_gather(all_last, last)
        return torch.cat([all_last[self.rank - 1], part[:-rows]])

    def check_gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise UsageError(
                    f"the parameter {name!r} got no gradient in a step, so that several processes cannot average it: "
                    f"leave it out of the training with --freeze {name}, or train in one process"
                )

    def share_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in buffers:
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for alike in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in alike])
            with self.explained():
                dist.broadcast(flat, src=0)
            for buffer, values in zip(alike, torch.split(flat, [buffer.numel() for buffer in alike]), strict=True):
                buffer.copy_(values.view_as(buffer))

    def norms(self, model: nn.Module) -> nn.Module:
        # torch has SyncBatchNorm for CUDA only. For other devices the model is not changed, and a warning
        # says so once.
        if not any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
            return model
        if self._device == "cuda":
            converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch
            return converted
        _warn_of_batch_norm()
        return model


class _Loss(nn.Module):
    """A model's loss as a module, which is what DistributedDataParallel takes."""

    def __init__(self, model: nn.Module, compute: Loss) -> None:
        super().__init__()
        self.model = model
        self._compute = compute

    def forward(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._compute(batch)


@functools.cache
def _warn_of_batch_norm() -> None:
    _log.warning(
        "BatchNorm normalises each process's part of a batch by the part's own statistics, and evaluation uses the "
        "main process's running statistics: torch synchronises BatchNorm on CUDA only"
    )


def _take_device(module: Any, device: str, number: int) -> None:
    """Make device `number` of this host the current one; `module` is torch's module for it, such as `torch.cuda`."""
    count = module.device_count()
    if number >= count:
        raise UsageError(
            f"each process needs a device of its own, and this host has {count} of {device!r}: start {count} "
            "process(es) on it, or use --device cpu"
        )
    module.set_device(number)


def _attempt(call: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001  # any error is raised on all processes
        return None, error


def _portable(error: Exception | None) -> Exception | None:
    """Return the error in a form that other processes can unpickle and raise; None for None."""
    if error is None or isinstance(error, TpucacheError):
        return error
    return TrainingError(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
