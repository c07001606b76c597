"""The backend torch: plain PyTorch on any device that torch has: a CPU, CUDA, TorchTPU."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from tpucache.errors import UsageError
from tpucache.machine import gpu_problem
from tpucache.ondevice.modules import TorchTable
from tpucache.ondevice.resident import NO_TILE, RecordSlots
from tpucache.training.device.base import MOST_AHEAD, Counters
from tpucache.training.device.process_group import open_processes
from tpucache.training.settings import Precision

_log = logging.getLogger("tpucache")


_NUMBERS: Final = itertools.count(1)


def open_device(cores: int, device: str, compile: bool) -> TorchDevice:
    """Return a device of the kind that `device` names; `compile` asks for torch.compile.

    Raises UsageError for more than one core, and if this machine has no such device.
    """
    if cores != 1:
        raise UsageError(f"the torch backend runs on 1 core, not {cores}: use --backend xla, or torchrun")
    kind = choose_device(device)
    open_processes(kind)  # each process takes the device with its local rank
    return CpuDevice(compile) if kind == "cpu" else open_accelerator(kind, compile)


class TorchDevice:
    """The methods that all torch devices share, CPUs and accelerators."""

    name = "torch"
    cores = 1
    pin_memory = False
    has_fused_optimizers = False
    precisions: Sequence[Precision] = ("float32", "bf16")
    layout: torch.memory_format = torch.channels_last
    tile = NO_TILE

    def __init__(self, torch_device: torch.device, compiles: bool = False) -> None:
        """Take an existing torch device; `compiles` says whether torch.compile compiles models."""
        self.processes = open_processes(torch_device.type)
        self.torch_device = torch_device
        self.compiles = compiles
        self._received_bytes = 0

    def place(self, model: nn.Module) -> nn.Module:
        # If compiling was asked for, the model is compiled in place, and keeps the names of its weights.
        model = model.to(self.torch_device, memory_format=self.layout)  # type: ignore[call-overload]  # torch: 4-d only
        if self.compiles:
            model.forward = _compiled(model.forward)
        return model

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> TorchTable:
        return TorchTable(slots, chunk)

    def free_bytes(self) -> int | None:
        return None

    def to_layout(self, images: torch.Tensor) -> torch.Tensor:
        return images.contiguous(memory_format=self.layout)

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return tensor.cpu

    def fetch_rows(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self.fetch(tensor)

    def fast_products(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def autocast(self, enabled: bool, dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[object]:
        return torch.autocast(self.torch_device.type, dtype=dtype, enabled=enabled)


def _compiled(forward: Callable[..., object]) -> Callable[..., object]:
    """Return a function that torch.compile compiles at its first call, for batches of one shape.

    torch compiles functions of its own files, such as `nn.Sequential.forward`, only when another function calls them.
    """

    def called(*inputs: object, **named: object) -> object:
        return forward(*inputs, **named)

    code = called.__code__.replace(co_name=f"model_{next(_NUMBERS)}")
    own = types.FunctionType(code, called.__globals__, code.co_name, called.__defaults__, called.__closure__)
    compiled, is_first = torch.compile(own, dynamic=False), True

    def checked(*inputs: object, **named: object) -> object:
        nonlocal is_first
        if not is_first:
            return compiled(*inputs, **named)
        is_first, before = False, compiled_graphs()
        outputs = compiled(*inputs, **named)
        if compiled_graphs() == before:
            _log.warning("torch.compile made no graph of the model: it runs uncompiled, which is slower")
        return outputs

    return checked


def compiled_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")  # the first torch.compile imports it, which takes seconds
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


class CpuDevice(TorchDevice):
    """The host's processor. Every operation has ended when its call returns.

    Weights and images have the channels-last layout, in which a step of resnet9 takes 0.81 of the time.
    """

    def __init__(self, compiles: bool = False) -> None:
        super().__init__(torch.device("cpu"), compiles)
        self._began: float | None = None
        self._execute_seconds = 0.0

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        self._received_bytes += batch.nbytes
        return batch

    def put_all(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [*map(self.put, batches)]

    def receive(self, batches: Iterable[torch.Tensor]) -> None:
        """Do nothing: the batches are on the device."""

    def step_begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        if self._began is None:
            self._began = time.perf_counter()

    def preserve_rng(self) -> AbstractContextManager[object]:
        return torch.random.fork_rng(devices=())

    def step_end(self) -> None:
        if self._began is not None:
            self._execute_seconds += time.perf_counter() - self._began
            self._began = None

    def wait(self) -> None:
        """Do nothing: all operations have run."""

    def counters(self) -> Counters:
        return Counters(compiled_graphs(), self._execute_seconds, self._received_bytes)

    def peak_bytes(self) -> None:
        """Return None: the memory is the host's."""


def open_accelerator(kind: str, compiles: bool = False) -> AcceleratorDevice:
    module = getattr(torch, kind)
    try:
        device = torch.device(kind, module.current_device())
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"the device {kind!r} is there but does not start: {error}. Use --device cpu") from error
    if kind == "cuda":
        _check_gpu(module, device)
    return (CudaDevice if kind == "cuda" else AcceleratorDevice)(device, module, compiles)


def _check_gpu(module: Any, device: torch.device) -> None:
    problem = gpu_problem(module.get_device_capability(device), module.get_arch_list())
    if not problem:
        try:
            torch.ones(2, device=device).sum().item()
        except RuntimeError as error:
            problem = f"a kernel fails: {str(error).splitlines()[0]}"
    if problem:
        raise UsageError(
            f"torch {torch.__version__} does not run on {module.get_device_name(device)}: {problem}. Choose another "
            "accelerator (on Kaggle GPU T4 x2, with --processes 2), install a torch that is built for this GPU, or use "
            "--device cpu"
        )


class AcceleratorDevice(TorchDevice):
    """A device with its own module in torch, such as `torch.tpu`; it runs operations in the order of their calls.

    An execution's time is measured by two events on the device, before its first and after its last operation.
    """

    layout = torch.contiguous_format  # a TPU's compiler chooses layouts itself

    def __init__(self, torch_device: torch.device, module: Any, compiles: bool = False) -> None:
        """Take an existing torch device, and torch's module for it, such as `torch.cuda`.

        `compiles` says whether torch.compile compiles models.
        """
        super().__init__(torch_device, compiles)
        self._module = module
        self._began: Any = None
        self._executions: deque[tuple[Any, Any]] = deque()  # events of executions that are not counted yet
        self._execute_seconds = 0.0

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        # The upload thread calls this, so that no step waits for the copy.
        self._received_bytes += batch.nbytes
        return batch.to(self.torch_device)

    def put_all(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [*self.put(torch.stack([*batches])).unbind()]

    def receive(self, batches: Iterable[torch.Tensor]) -> None:
        """Do nothing: the batches are on the device."""

    def step_begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        if self._began is None:
            self._began = self._record()

    @contextlib.contextmanager
    def preserve_rng(self) -> Iterator[None]:
        state = self._module.get_rng_state(self.torch_device)
        try:
            with torch.random.fork_rng(devices=()):
                yield
        finally:
            self._module.set_rng_state(state, self.torch_device)

    def step_end(self) -> None:
        if self._began is None:
            return
        self._executions.append((self._began, self._record()))
        self._began = None
        if len(self._executions) > MOST_AHEAD:
            self._executions[0][1].synchronize()
        self._count_ended()

    def wait(self) -> None:
        self._module.synchronize(self.torch_device)

    def counters(self) -> Counters:
        self._count_ended()
        return Counters(compiled_graphs(), self._execute_seconds, self._received_bytes)

    def peak_bytes(self) -> int | None:
        peak = getattr(self._module, "max_memory_allocated", None)
        return None if peak is None else int(peak(self.torch_device))

    def free_bytes(self) -> int | None:
        # Memory that torch has reserved in this process is not free, even if no tensor uses it.
        info = getattr(self._module, "mem_get_info", None)
        return None if info is None else int(info(self.torch_device)[0])

    def _record(self) -> Any:
        # Waiting for a blocking event leaves the processor to other threads.
        event = self._module.Event(enable_timing=True, blocking=True)
        event.record(self._module.current_stream(self.torch_device))
        return event

    def _count_ended(self) -> None:
        while self._executions and self._executions[0][1].query():
            began, ended = self._executions.popleft()
            self._execute_seconds += began.elapsed_time(ended) / 1e3


class _Upload(NamedTuple):
    event: Any  # after the copy
    host: torch.Tensor
    sent: torch.Tensor


class CudaDevice(AcceleratorDevice):
    """A GPU: batches are copied from page-locked memory on a separate stream, while the GPU computes."""

    pin_memory = True
    has_fused_optimizers = True
    #: Whether float32 matrix multiplications use TF32 within `fast_products`, on a GPU that has TF32: 10 bits of the
    #: fraction instead of 23. Convolutions use TF32 by torch's default. False turns TF32 off for both.
    tf32 = True
    layout = torch.channels_last

    def __init__(self, torch_device: torch.device, module: Any, compiles: bool = False) -> None:
        super().__init__(torch_device, module, compiles)
        # Older GPUs emulate bfloat16 by float32, which is slower.
        has_bf16 = module.is_bf16_supported(including_emulation=False)
        self.precisions = ("bf16", "fp16", "float32") if has_bf16 else ("fp16", "bf16", "float32")
        self._stream = module.Stream(torch_device)
        self._lock = threading.Lock()  # two threads send batches: of training and of evaluation
        self._uploads: dict[int, _Upload] = {}  # by the id of `sent`, which the entry keeps alive

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        # The host's batch is kept until the copy has ended, so that its buffer is not overwritten.
        # In a new thread the current device is number 0, and leaving the stream context would start that one, too.
        with self._module.device(self.torch_device), self._module.stream(self._stream):
            sent = torch.empty_like(batch, device=self.torch_device)
            sent.copy_(batch, non_blocking=True)
            event = self._module.Event()
            event.record(self._stream)
        with self._lock:
            self._release()
            self._uploads[id(sent)] = _Upload(event, batch, sent)
            self._received_bytes += batch.nbytes
        return sent

    def put_all(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sent = self.put(torch.stack([*batches]))
        parts = [*sent.unbind()]
        with self._lock:
            if (upload := self._uploads.get(id(sent))) is not None:  # otherwise the copy has ended
                self._uploads |= {id(part): upload._replace(sent=part) for part in parts}
        return parts

    def receive(self, batches: Iterable[torch.Tensor]) -> None:
        stream = self._module.current_stream(self.torch_device)
        with self._lock:
            for batch in batches:
                if (upload := self._uploads.get(id(batch))) is not None:
                    stream.wait_event(upload.event)
                # Otherwise the upload stream could reuse the batch's memory while this stream still reads it.
                batch.record_stream(stream)
            self._release()

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        # Waiting for the copy does not wait for operations that are sent later. The copy goes through page-
        # locked memory, which is free again after the returned function was called.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin_memory)
        host.copy_(tensor, non_blocking=True)
        event = self._module.Event(blocking=True)
        event.record(self._module.current_stream(self.torch_device))

        def fetched(_source: torch.Tensor = tensor) -> torch.Tensor:  # keeps the tensor alive until it is copied
            event.synchronize()
            return host.clone()  # so that callers do not keep page-locked memory

        return fetched

    @contextlib.contextmanager
    def fast_products(self) -> Iterator[None]:
        # torch has these settings for all threads, so the earlier settings are restored afterwards. If the
        # program has set the precision of matrix multiplications itself, that precision is kept.
        cudnn, benchmark = torch.backends.cudnn, torch.backends.cudnn.benchmark
        cudnn.benchmark = True  # all batches have one shape, so one trial is enough
        try:
            with self._tf32_products():
                yield
        finally:
            cudnn.benchmark = benchmark

    @contextlib.contextmanager
    def _tf32_products(self) -> Iterator[None]:
        before, wanted = _products(), ("high" if self.tf32 else "highest", self.tf32)
        if before is None or before == wanted or (self.tf32 and before[0] != "highest"):
            yield
            return
        _set_products(*wanted)
        try:
            yield
        finally:
            _set_products(*before)

    def wait(self) -> None:
        super().wait()
        with self._lock:
            self._release()

    def _release(self) -> None:
        self._uploads = {key: upload for key, upload in self._uploads.items() if not upload.event.query()}


def _products() -> tuple[str, bool] | None:
    """Return torch's precision of float32 matrix multiplications, and whether convolutions may use TF32.

    Return None if the program uses the newer settings of torch 2.9, which cannot be mixed with these.
    """
    try:
        with _no_warning():
            return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def _set_products(precision: str, allow_tf32: bool) -> None:
    with _no_warning():
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = allow_tf32


@contextlib.contextmanager
def _no_warning() -> Iterator[None]:
    """Hide torch 2.9's warnings about its older settings of precision, which torch's compiler still needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def find_devices() -> list[str]:
    """Return the kinds of devices that this machine has, the preferred kind first; "cpu" is always among them."""
    found = ["cuda"] if torch.cuda.is_available() else []
    accelerator = getattr(torch, "accelerator", None)  # torch has it since 2.6
    if accelerator is not None and accelerator.is_available():
        # TorchTPU registers itself when torch is imported. It only looks at the PCI bus, so that this does not take the
        # TPU from a program that uses it.
        found += [kind for kind in [accelerator.current_accelerator().type] if kind == "tpu"]
    return [*found, "cpu"]


def choose_device(name: str) -> str:
    """Return the kind of device that `name`, one of DEVICES, means on this machine."""
    found = find_devices()
    if name == "auto":
        return found[0]
    if name not in found:
        raise UsageError(
            f"there is no device {name!r} here: torch {torch.__version__} finds {' and '.join(found)}. Use one of "
            "these, or auto; `tpucache doctor` says what this machine has"
        )
    return name
