"""What plain torch does in the same way on every device."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import torch
from torch import nn

from tpucache.training.device.processes import open_processes
from tpucache.training.settings import Precision

_log = logging.getLogger("tpucache")
_NUMBERS: Final = itertools.count(1)


class TorchDevice:
    """The part of a device that does not depend on whether it runs beside the host or is the host."""

    name = "torch"
    cores = 1
    pin_memory = False
    has_fused_optimizers = False
    precisions: Sequence[Precision] = ("float32", "bf16")
    layout: torch.memory_format = torch.channels_last

    def __init__(self, torch_device: torch.device, compiles: bool = False) -> None:
        """Take a torch device that is there; `compiles` is whether models are compiled by torch.compile."""
        self.processes = open_processes(torch_device.type)
        self.torch_device = torch_device
        self._compiles = compiles
        self._received_bytes = 0

    def place(self, model: nn.Module) -> nn.Module:
        """Send the weights and give them their layout; compile the model in place, so that their names stay."""
        model = model.to(self.torch_device, memory_format=self.layout)  # type: ignore[call-overload]  # torch: 4-d only
        if self._compiles:
            model.forward = _compiled(model.forward)
        return model

    def to_layout(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images in the layout of the weights."""
        return images.contiguous(memory_format=self.layout)

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return the copy itself, which is made when it is called for."""
        return tensor.cpu

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor: there is one core."""
        return tensor

    def fast_products(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing: torch's setting is one for GPUs."""
        return contextlib.nullcontext()

    def autocast(self, enabled: bool, dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[object]:
        """Return torch's own context."""
        return torch.autocast(self.torch_device.type, dtype=dtype, enabled=enabled)

    @contextlib.contextmanager
    def profile(self, folder: Path) -> Iterator[None]:
        """Trace with torch's own profiler, into `trace.json` for Perfetto or chrome://tracing."""
        with torch.profiler.profile() as profiler:
            yield
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "trace.json"))


def _compiled(forward: Callable[..., object]) -> Callable[..., object]:
    """Return a function that torch.compile compiles when it is first called, for batches that all have the same shape.

    torch compiles no function of its own files, such as `nn.Sequential.forward`, unless another one calls it. It keeps
    graphs by a function's code, at most eight of them, and then runs that code as it is: each model gets code of its
    own. Where a model is not compiled all the same, a warning says so once.
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
    """Return how many graphs torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # imported with the first torch.compile, for seconds
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
