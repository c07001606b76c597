"""The backend xla: one core as a plain device, all cores by SPMD over a one-axis mesh.

Only this file imports torch_xla. With SPMD there is one process, one loader, one copy of the data and one trace,
however many cores a host has. Batches are split along their first dimension, parameters are replicated, and BatchNorm
sees the global batch. On a pod there is one process on each host, which reads and sends its rows of the global batch;
all run the same program.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from tpucache.errors import DependencyError, UsageError
from tpucache.machine import keep_freed_blocks
from tpucache.ondevice.resident import XLA_TILE, DeviceFullError, RecordSlots
from tpucache.training.device.base import ALONE, MOST_AHEAD, BusyTime, Counters, is_launched
from tpucache.training.device.process_group import join_hosts
from tpucache.training.device.tensors import READERS
from tpucache.training.settings import Precision

# XLA's C++ code logs warnings at every compile; its errors are still shown.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# Importing torch_xla sets PJRT_DEVICE if it is not set.
_IS_CHOSEN: Final = "PJRT_DEVICE" in os.environ

try:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.core import xla_op_registry
    from torch_xla.experimental.callback import on_ready_event
except ImportError as error:
    raise DependencyError(
        f"torch_xla cannot be imported: {error}. Run `pip install torch==2.9.0 torch_xla==2.9.0`, or use --backend "
        "torch"
    ) from error


#: The runtime's metrics of execution times: on one device, and under SPMD on all.
_EXECUTIONS: Final = ("ExecuteTime", "ExecuteReplicatedTime")
#: Steps after which execution times are read. The runtime keeps the last 1,024; a step may be several executions.
_READ_AFTER: Final = 64

#: torch_xla's environment variable for the folder of compiled graphs.
_CACHE_PATH: Final = "XLA_PERSISTENT_CACHE_PATH"

#: The port on which the first process of a pod listens, unless MASTER_PORT names another one.
_PORT: Final = "12355"

_log: Final = logging.getLogger("tpucache")


def open_device(cores: int, device: str, compile: bool) -> XlaDevice:
    """Return the device that PJRT_DEVICE names. Raises UsageError if `device` is not "auto", or `compile` is set."""
    if device != "auto":
        raise UsageError(
            f"xla uses the device that PJRT_DEVICE names, not {device!r}: for that one, use --backend torch"
        )
    if compile:
        raise UsageError("xla compiles whole steps by itself: leave --compile out, or use --backend torch")
    return XlaDevice(cores)


class XlaDevice:
    """One XLA core, or all cores of this host, or of all hosts of a pod."""

    name = "xla"
    pin_memory = False
    has_fused_optimizers = False
    precisions: Sequence[Precision] = ("float32", "bf16")
    tile = XLA_TILE

    def __init__(self, cores: int = 1) -> None:
        """Open XLA on 1 core, or on all cores of this host or pod if `cores` is 0.

        Call this before anything else uses XLA.
        """
        if is_launched():
            raise UsageError(
                "--backend xla uses all cores of a host from one process: start the command without torchrun "
                "(--cores 1 uses one core)"
            )
        if os.environ.get("TPU_PROCESS_ADDRESSES") == "local":
            # Kaggle's image sets it although there are no peers.
            del os.environ["TPU_PROCESS_ADDRESSES"]
            _log.warning(
                "TPU_PROCESS_ADDRESSES=local was removed from the environment: libtpu would wait for other processes"
            )
        keep_freed_blocks()  # torch_xla copies each batch to a new block, and the CPU client copies it again
        self.cores, self.processes = cores, ALONE
        self._mesh: Any = None
        self._own_shards: torch.Tensor | None = None  # this host's shards of a batch that is gathered from all hosts
        self._is_sliced = False  # whether batches are sent as one slice for each core
        self._sent: deque[torch.Tensor] = deque()  # one output of each queued execution
        self._since_read = 0
        self._executions = _Executions()
        with _explained_errors():
            if xr.device_type() == "CPU" and not _IS_CHOSEN:
                _log.warning(
                    "no TPU found: XLA runs on the CPU. Set PJRT_DEVICE=CPU if you want that, or use --backend torch, "
                    "which is faster on a CPU; `tpucache doctor` says what this machine has"
                )
            keep_compiled(str(xr.device_type()))
            hosts = xr.process_count()
            if not cores and xr.device_type() == "CPU":  # a single device needs no mesh
                self.cores = int(os.environ.get("CPU_NUM_DEVICES", "1"))
            if self.cores != 1 or hosts > 1:
                self._open_mesh(hosts)
            if xr.device_type() == "TPU":  # a TPU multiplies float32 in bfloat16 anyway
                self.precisions = ("bf16", "float32")
            self.torch_device = torch_xla.device()
        if hosts > 1:
            self.processes = join_hosts(xr.process_index(), hosts, _meeting_point())
            self._own_shards = self._find_shards()

    def _open_mesh(self, hosts: int) -> None:
        if not xr.is_spmd():
            xr.use_spmd()
        available, everywhere = xr.addressable_runtime_device_count(), xr.global_runtime_device_count()
        self.cores = self.cores or available
        if self.cores != available:
            raise UsageError(
                f"cores is {'1 or ' * (hosts == 1)}all: this machine has {available} ({xr.device_type()}), not "
                f"{self.cores}. On a CPU, CPU_NUM_DEVICES sets the number"
            )
        if everywhere != available * hosts:
            raise UsageError(
                f"the {hosts} hosts together have {everywhere} cores, and this host {available}: use hosts with the "
                "same number of cores"
            )
        self._mesh = xs.Mesh(np.arange(everywhere), (everywhere,), ("data",))
        self._is_sliced = hosts == 1 and self._can_slice()

    def _can_slice(self) -> bool:
        """Return whether torch_xla can send slice n of a batch to core n; if not, log a warning."""
        numbers, can_slice = torch.arange(self.cores), False
        with contextlib.suppress(AttributeError, TypeError, RuntimeError):  # the function is not public
            found = torch_xla._XLAC._get_local_shards([self._put_slices(numbers)])[0]
            can_slice = [(int(shard), name.rpartition(":")[2]) for shard, name in found] == [
                (number, str(number)) for number in range(self.cores)
            ]
        if not can_slice:
            _log.warning("this torch_xla cannot send a batch as a slice for each core: uploads take longer")
        return can_slice

    def _find_shards(self) -> torch.Tensor:
        numbers = torch.arange(self.cores) + self.cores * self.processes.rank
        gathered = self._gathered(self.put(numbers) + 0)
        self.step_end()
        return torch.argsort(gathered.cpu())[numbers]

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        # This waits until the copy has ended, so that the runtime does not count it as execution time.
        if self._mesh is not None and len(batch) % self.cores:
            raise UsageError(
                f"a batch of {len(batch)} does not divide over {self.cores} cores: use a batch size that does"
            )
        if self._is_sliced and len(batch):
            sent = self._put_slices(batch)
        else:
            spec = None
            if self._mesh is not None:
                spec = xs.ShardingSpec(self._mesh, _split(batch), minibatch=self.processes.world_size > 1)
            sent = xm.send_cpu_data_to_device([batch], self.torch_device, spec)[0]
        on_ready_event(sent).wait()
        return sent

    def put_all(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # On one core, one call of torch_xla sends all of them.
        if self._mesh is not None:
            return [*map(self.put, batches)]
        sent: list[torch.Tensor] = xm.send_cpu_data_to_device([*batches], self.torch_device)
        on_ready_event(sent[-1]).wait()
        return sent

    def _put_slices(self, batch: torch.Tensor) -> torch.Tensor:
        """Send each core only its rows of a batch: torch_xla would copy each core's rows of a whole batch once more."""
        sharding = self._mesh.get_op_sharding(_split(batch))
        sent: torch.Tensor = torch_xla._XLAC._global_tensor_from_cpu_shards(
            [*batch.chunk(self.cores)], sharding, [*batch.shape]
        )
        return sent

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> XlaTable:
        return XlaTable(slots, chunk, self._mesh)

    def free_bytes(self) -> int | None:
        # torch_xla 2.9 does not report it for several cores, and XLA's CPU client not at all.
        found = self._memory_info()
        if found is None:
            return None
        return self.cores * min(int(each["bytes_limit"]) - int(each["bytes_used"]) for each in found)

    def receive(self, batches: Iterable[torch.Tensor]) -> None:
        """Do nothing: XLA orders computations by the data that they need."""

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return tensor.cpu

    def place(self, model: nn.Module) -> nn.Module:
        return model.to(self.torch_device)

    def to_layout(self, images: torch.Tensor) -> torch.Tensor:
        return images

    def fetch_rows(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        gathered, shards = self._gathered(tensor), self._own_shards
        if shards is None:
            return gathered.cpu

        def fetched() -> torch.Tensor:
            rows, cores = gathered.cpu(), self.cores * self.processes.world_size
            return rows.view(cores, -1, *rows.shape[1:])[shards].flatten(0, 1)

        return fetched

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        # Otherwise each read of the tensor would compile another graph, which gathers it.
        if self._mesh is not None:
            xs.mark_sharding(tensor, self._mesh, (None,) * tensor.dim())
        return tensor

    def step_begin(self, seed: int) -> None:
        torch_xla.manual_seed(seed)

    @contextlib.contextmanager
    def preserve_rng(self) -> Iterator[None]:
        state = xm.get_rng_state()
        try:
            with torch.random.fork_rng(devices=()):
                yield
        finally:
            xm.set_rng_state(state)

    def step_end(self) -> None:
        self._sent.append(torch.zeros((), device=self.torch_device))  # an output to wait for
        torch_xla.sync()
        if len(self._sent) > MOST_AHEAD:
            on_ready_event(self._sent.popleft()).wait()
        self._since_read += 1
        if self._since_read >= _READ_AFTER:
            self._since_read = 0
            self._executions.read()

    def wait(self) -> None:
        torch_xla.sync()
        xm.wait_device_ops()
        self._sent.clear()

    def fast_products(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def autocast(self, enabled: bool, dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[object]:
        return torch.autocast("xla", dtype=dtype, enabled=enabled)

    def counters(self) -> Counters:
        self._executions.read()
        compiles, compiling = _metric("CompileTime")
        return Counters(
            compiles=compiles,
            compile_seconds=compiling / 1e9,
            execute_seconds=self._executions.busy.seconds,
            received_bytes=int(_metric("OutboundData")[1]),
        )

    def peak_bytes(self) -> int | None:
        # XLA's CPU client does not report it, nor does torch_xla 2.9 for several cores.
        found = self._memory_info()
        return None if found is None else max(int(each["peak_bytes_used"]) for each in found)

    def _memory_info(self) -> list[Mapping[str, int]] | None:
        """Return the runtime's figures on the memory of the core, in a list; None if it has none.

        With several cores, torch_xla 2.9 sees one virtual device, and has no figures for it.
        """
        try:
            found = xm.get_memory_info(str(self.torch_device))
        except (RuntimeError, ValueError):
            return None
        return [found] if all(map(found.get, ("bytes_used", "bytes_limit", "peak_bytes_used"))) else None


def keep_compiled(kind: str) -> None:
    """Keep compiled graphs on disk for later processes, if the runtime of this kind of device can read them.

    A TPU's runtime can; XLA's CPU client writes them and refuses to read them. As graphs contain code, the folder must
    belong to this user alone; a warning says why nothing is kept. If XLA_PERSISTENT_CACHE_PATH is set, nothing is done
    here, because torch_xla uses that folder.
    """
    if kind != "TPU" or _CACHE_PATH in os.environ or torch_xla._XLAC._xla_computation_cache_is_initialized():
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpucache-xla"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
        if not is_own:
            raise OSError(f"{folder} is a link, or others can write to it")
    except (OSError, RuntimeError) as error:  # there may be no home
        _log.warning("compiled graphs are not kept for later processes: %s. Set %s to a folder", error, _CACHE_PATH)
        return
    xr.initialize_cache(str(folder))


class XlaTable:
    """Records in the memory of the cores. Each core keeps its rows of every chunk, one chunk after another.

    Rows are padded to whole tiles, as in a TPU's memory, so that the table takes exactly the planned bytes.
    """

    def __init__(self, slots: RecordSlots, chunk: torch.Tensor, mesh: Any) -> None:
        """Reserve memory for the rows of `slots`, divided over the cores of `mesh` as chunks are."""
        self._shape, self._slots, self._mesh = chunk.shape[1:], slots, mesh
        self._each = len(chunk) // slots.cores
        self._values = math.prod(self._shape)
        self._filled = XLA_TILE.padded(self._values) - self._values
        shape = (slots.cores, slots.rows_a_core, self._values + self._filled)[: 2 if self._values == 1 else 3]
        self.rows = torch.zeros(shape, dtype=chunk.dtype, device=chunk.device)
        if mesh is not None:
            xs.mark_sharding(self.rows, mesh, _split(self.rows))
        try:
            torch_xla.sync()  # otherwise the first chunk's graph would differ from that of the others
            on_ready_event(self.rows).wait()
        except RuntimeError as error:
            raise DeviceFullError(
                f"{self.rows.nbytes / 1e9:,.2f} GB of records do not fit into the memory of {slots.cores} core(s): "
                f"use resident=no ({str(error).splitlines()[0]})"
            ) from error

    def write(self, number: torch.Tensor, chunk: torch.Tensor) -> None:
        """Write the records `chunk` to the rows of chunk `number`, in place.

        XLA reuses the table's memory only if the table is the only output of the graph.
        """
        row = () if self._values == 1 else (self._values,)
        rows = chunk.reshape(self._slots.cores, self._each, *row)
        if self._filled:
            rows = torch.nn.functional.pad(rows, (0, self._filled))
        self.rows.copy_(_WRITE(self.rows, rows, number[0] * self._each))

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        rows = self.rows.flatten(0, 1).index_select(0, slots)
        if self._filled:
            rows = rows[:, : self._values]
        rows = rows.reshape(-1, *self._shape)
        if self._mesh is not None:
            xs.mark_sharding(rows, self._mesh, _split(rows))
        return rows


def _write(rows: Any, chunk: Any, start: Any) -> Any:
    """Return XLA's operation that writes `chunk` into `rows`, from the position `start` of the second dimension.

    torch has no such operation for a `start` that is on the device.
    """
    zero = start - start
    return rows.dynamic_update_slice(chunk, [zero, start, zero][: rows.shape().rank])


_WRITE: Final = xla_op_registry.register("tpucache_write", _write)


READERS["xla"] = torch_xla._XLAC._xla_get_cpu_tensors


def _split(batch: torch.Tensor) -> tuple[str | None, ...]:
    return "data", *[None] * (batch.dim() - 1)


@contextlib.contextmanager
def _explained_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise UsageError(
            f"PJRT_DEVICE={os.environ.get('PJRT_DEVICE')} has no device here: {error}. See what this machine has with "
            "`tpucache doctor`, set PJRT_DEVICE=CPU, or use --backend torch"
        ) from error


def _meeting_point() -> str:
    return f"{os.environ.get('MASTER_ADDR') or xr.get_master_ip()}:{os.environ.get('MASTER_PORT', _PORT)}"


class _Executions:
    """Adds up the time in which the device was busy, from the runtime's record of each execution."""

    def __init__(self) -> None:
        self.busy = BusyTime()
        self._counted = {name: _metric(name)[0] for name in _EXECUTIONS}
        self._lock = threading.Lock()  # a progress bar may call from another thread

    def read(self) -> None:
        with self._lock:
            for name in _EXECUTIONS:
                if (data := met.metric_data(name)) is not None:
                    new, self._counted[name] = int(data[0]) - self._counted[name], int(data[0])
                    samples: Sequence[tuple[float, float]] = data[2]  # end in s, duration in ns
                    for ended, nanoseconds in samples[max(0, len(samples) - new) :]:
                        self.busy.add(ended - nanoseconds / 1e9, ended)


def _metric(name: str) -> tuple[int, float]:
    data = met.metric_data(name)
    return (0, 0.0) if data is None else (int(data[0]), float(data[1]))
