"""Traces a few executions of training steps with the backend's own profiler."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Final

from tpucache.training.device import Device
from tpucache.training.feed.idle import WARMUP_EXECUTIONS

_TRACED: Final = 5  # executions in a trace

_log = logging.getLogger("tpucache")


class Tracer:
    """Traces a few executions of training steps after the warm-up with the device's profiler, if a folder is given."""

    def __init__(self, device: Device, folder: Path | None) -> None:
        self._device, self._folder = device, folder
        self._seen = 0
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        if self._folder is not None and self._seen < WARMUP_EXECUTIONS:
            _log.warning("nothing was traced: the run has ended within its warm-up of %d executions", WARMUP_EXECUTIONS)

    def step(self) -> None:
        """Count an execution that has been sent to the device; begin or end the trace if it is time."""
        if self._folder is None:
            return
        self._seen += 1
        if self._seen == WARMUP_EXECUTIONS:
            self._device.wait()
            self._open.enter_context(self._device.profile(self._folder))
        elif self._seen == WARMUP_EXECUTIONS + _TRACED:
            self._device.wait()  # otherwise the trace would miss the last operations
            self._open.close()
