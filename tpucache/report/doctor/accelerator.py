"""Which devices XLA and torch find. Separate processes ask: starting XLA in this one would break every later fork."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

#: What Kaggle's TPU image sets although there are no peers; libtpu then waits for them.
LOCAL: Final = ("TPU_PROCESS_ADDRESSES", "local")
_SECONDS: Final = 90.0
_XLA: Final = (
    "import json, torch_xla.runtime as runtime\n"
    "print('found', json.dumps([runtime.device_type(), runtime.global_runtime_device_count()]))"
)
_TORCH: Final = """
import json, torch
found = []
if torch.cuda.is_available():
    found += [f"cuda: {torch.cuda.get_device_name(number)}" for number in range(torch.cuda.device_count())]
accelerator = getattr(torch, "accelerator", None)
if accelerator is not None and accelerator.is_available():
    # Neither of these starts a TPU.
    kind, count = accelerator.current_accelerator().type, accelerator.device_count()
    found += [f"tpu: {count} chips"] if kind == "tpu" else []
print("found", json.dumps([*found, "cpu"]))
"""


@dataclass(frozen=True)
class Xla:
    """XLA's device and its number of cores, or the error why there is none; and the seconds that starting it took."""

    device: str
    cores: int
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class TorchDevices:
    """The devices that plain torch finds, the one to prefer first, or the error why it finds none."""

    devices: tuple[str, ...]
    error: str = ""


def ask_xla(
    environ: Mapping[str, str], seconds: float = _SECONDS, command: Sequence[str] = (sys.executable, "-c", _XLA)
) -> Xla:
    """Start XLA in a separate process with this environment and ask for its device; stop it after `seconds`."""
    name, value = LOCAL
    environment = {key: text for key, text in environ.items() if (key, text) != (name, value)}  # as training does
    began = time.monotonic()
    found, error = _ask(environment, seconds, command)
    took = time.monotonic() - began
    return Xla("", 0, took, error) if found is None else Xla(str(found[0]), int(found[1]), took)


def ask_torch(
    environ: Mapping[str, str], seconds: float = _SECONDS, command: Sequence[str] = (sys.executable, "-c", _TORCH)
) -> TorchDevices:
    """Import torch in a separate process with this environment and ask for its devices; stop it after `seconds`."""
    found, error = _ask(environ, seconds, command)
    return TorchDevices(() if found is None else tuple(map(str, found)), error)


def _ask(environ: Mapping[str, str], seconds: float, command: Sequence[str]) -> tuple[list[Any] | None, str]:
    """Return the list that a program prints as JSON after the word `found`, or None and the reason."""
    try:
        done = subprocess.run(  # noqa: S603  # this Python, with one of the programs above
            command, env=environ, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer in {seconds:,.0f} s"
    except OSError as error:
        return None, str(error)
    for line in done.stdout.splitlines():
        if line.startswith("found "):
            found: list[Any] = json.loads(line.removeprefix("found "))
            return found, ""
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    return None, errors[-1].strip() if errors else f"ended with status {done.returncode}"
