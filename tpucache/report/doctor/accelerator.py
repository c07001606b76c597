"""Which device XLA finds. A separate process asks, because starting XLA in this one would break every later fork."""

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
_CODE: Final = (
    "import json, torch_xla.runtime as runtime\n"
    "print('found', json.dumps([runtime.device_type(), runtime.global_runtime_device_count()]))"
)


@dataclass(frozen=True)
class Xla:
    """XLA's device and its number of cores, or the error why there is none; and the seconds that starting it took."""

    device: str
    cores: int
    seconds: float
    error: str = ""


def ask_xla(
    environ: Mapping[str, str], seconds: float = _SECONDS, command: Sequence[str] = (sys.executable, "-c", _CODE)
) -> Xla:
    """Start XLA in a separate process with this environment and ask for its device; stop it after `seconds`."""
    name, value = LOCAL
    environment = {key: text for key, text in environ.items() if (key, text) != (name, value)}  # as training does
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
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    return Xla("", 0, took, errors[-1].strip() if errors else f"ended with status {done.returncode}")
