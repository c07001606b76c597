"""A stand-in for `torch.cuda` on the CPU: streams whose copies are done as late as the device may do them.

What is computed runs at once, as the CPU does; a copy that does not block is done when something waits for it. Until
then its target holds garbage: whoever reads too early gets wrong numbers, and whoever frees too early an error.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque

import torch

from tpucache.training.device.torch_device import CudaDevice

_copy = torch.Tensor.copy_


class Event:
    def __init__(self, module, timed):
        self.module, self.timed, self.stream, self.time = module, timed, None, None

    def record(self, stream):
        assert self.stream is None, "an event is recorded once"
        self.stream, self.time = stream, self.module.clock()
        stream.work.append(self)

    def query(self):
        return self.stream is not None and self not in self.stream.work

    def synchronize(self):
        self.module.log.append(("synchronize", self.stream.name))
        self.stream.run_to(self)

    def elapsed_time(self, later):
        assert all(event.timed and event.query() for event in (self, later))
        return (later.time - self.time) * 1e3


class Stream:
    def __init__(self, module, name):
        self.module, self.name, self.work = module, name, deque()

    def run_to(self, event):
        with self.module.lock:
            while event in self.work:
                self.step()

    def step(self):
        item = self.work.popleft()
        if not isinstance(item, Event):
            item()

    def wait_event(self, event):
        self.module.log.append(("wait", self.name, event.stream.name))
        event.stream.run_to(
            event
        )  # what is computed after this runs at once, so it is now that the copy has to be done


class StandIn:
    """A module as `torch.cuda` is one, for the device `cpu`."""

    has_bf16 = True

    def __init__(self, clock=lambda: 0.0):
        self.clock, self.log, self.lock = clock, [], threading.RLock()
        self.compute, self.streams, self._current = Stream(self, "compute"), [], threading.local()

    def is_bf16_supported(self, including_emulation=True):
        return self.has_bf16 or including_emulation

    def Stream(self, _device):
        self.streams.append(Stream(self, "copy"))
        return self.streams[-1]

    def Event(self, enable_timing=False, blocking=False):
        return Event(self, enable_timing)

    def current_stream(self, _device=None):
        return getattr(self._current, "stream", self.compute)

    @contextlib.contextmanager
    def device(self, device):
        self._current.device = device
        try:
            yield
        finally:
            del self._current.device

    @contextlib.contextmanager
    def stream(self, stream):
        assert hasattr(self._current, "device"), "the stream is of another device than the thread's current one"
        self._current.stream = stream
        try:
            yield
        finally:
            del self._current.stream

    def synchronize(self, _device=None):
        with self.lock:
            for stream in (self.compute, *self.streams):
                while stream.work:
                    stream.step()

    def get_rng_state(self, _device=None):
        return torch.random.get_rng_state()

    def set_rng_state(self, state, _device=None):
        torch.random.set_rng_state(state)

    def copy(self, target, source, non_blocking=False):
        if not non_blocking:
            return _copy(target, source)
        stream, kept = self.current_stream(), weakref.ref(source)
        self.log.append(("copy", stream.name))
        _copy(target, torch.full((), 77, dtype=target.dtype))

        def late():
            assert kept() is not None, "the host's memory was given back before its copy had ended"
            _copy(target, kept())

        with self.lock:
            stream.work.append(late)
        return target


def install(monkeypatch, module):
    """Let copies that do not block, and streams that are recorded, go to the stand-in."""

    def copy(target, source, non_blocking=False):  # unlike a bound method, it is bound to the tensor
        return module.copy(target, source, non_blocking)

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # and as it was, after the test
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: module.log.append(("record", stream.name)))
    return module


def open_cuda(module):
    """A GPU's device on the stand-in, whose batches are in the loader's pool, as the CPU has no page-locked memory."""
    device = CudaDevice(torch.device("cpu"), module)
    device.pin_memory = False
    return device
