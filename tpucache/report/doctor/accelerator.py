"""What XLA finds, asked in a process of its own: asking in this one would break every later fork."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

#: What Kaggle's TPU image sets although there are no peers; libtpu then waits for them.
LOCAL: Final = ("TPU_PROCESS_ADDRESSES", "local")
_SECONDS: Final = 90.0
_ASK: Final = (
    "import json, torch_xla.runtime as runtime\n"
    "print('found', json.dumps([runtime.device_type(), runtime.global_runtime_device_count()]))"
)


@dataclass(frozen=True)
class Xla:
    """XLA's device and how many cores it has there, or the reason why it has none; and the seconds it took to start."""

    device: str
    cores: int
    seconds: float
    error: str = ""


def ask_xla(
    environ: Mapping[str, str], seconds: float = _SECONDS, command: Sequence[str] = (sys.executable, "-c", _ASK)
) -> Xla:
    """Start XLA in a process of its own with this environment, and ask it; it is stopped after so many seconds."""
    name, value = LOCAL
    environment = {key: held for key, held in environ.items() if (key, held) != (name, value)}  # as the harness does
    began = time.monotonic()
    try:
        done = subprocess.run(  # noqa: S603  # this Python, with the code above
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Xla("", 0, time.monotonic() - began, f"no answer in {seconds:,.0f} s")
    except OSError as error:
        return Xla("", 0, 0.0, str(error))
    took = time.monotonic() - began
    for line in done.stdout.splitlines():
        if line.startswith("found "):
            device, cores = json.loads(line.removeprefix("found "))
            return Xla(str(device), int(cores), took)
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return Xla("", 0, took, said[-1].strip() if said else f"ended with status {done.returncode}")
