"""The facts of a machine, gathered once; `advice.py` says what is wrong with them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tpucache.machine import Cores, Memory, Space, Tpu, count_cores, find_tpu, measure_memory, measure_space
from tpucache.report.doctor.accelerator import TorchDevices, Xla, ask_torch, ask_xla
from tpucache.report.doctor.libraries import Library, find_decoders, find_libraries
from tpucache.report.doctor.mounts import USUAL, Mount, look_into
from tpucache.version import __version__

#: Variables that decide what XLA and the workers do.
_VARIABLES: Final = (
    "PJRT_DEVICE",
    "TPU_PROCESS_ADDRESSES",
    "TPU_VISIBLE_CHIPS",
    "CPU_NUM_DEVICES",
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class Roots:
    """Where the kernel's files and the mounts are, so that a test can have its own."""

    meminfo: Path = Path("/proc/meminfo")
    cgroup: Path = Path("/sys/fs/cgroup")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    mounts: tuple[Path, ...] = tuple(map(Path, USUAL))


@dataclass(frozen=True)
class Facts:
    """A machine, its libraries and its mounts. `xla` and `torch` are None where they were not asked."""

    tpucache: str
    python: str
    platform: str
    cores: Cores
    memory: Memory
    shm: Space | None
    disk: Space | None
    tpu: Tpu | None
    xla: Xla | None
    environment: Mapping[str, str]
    libraries: tuple[Library, ...]
    decoders: Mapping[str, str]
    mounts: tuple[Mount, ...]
    torch: TorchDevices | None = None

    def version(self, name: str) -> str | None:
        """Return a library's version, None where it is not installed."""
        return next((library.version for library in self.libraries if library.name == name), None)


def gather(roots: Roots | None = None, environ: Mapping[str, str] | None = None, *, xla: bool = True) -> Facts:
    """Gather the facts of this machine; with `xla`, what XLA and torch find where they are installed, too (seconds)."""
    roots = roots or Roots()
    environ = os.environ if environ is None else environ
    libraries = find_libraries()
    installed = {library.name for library in libraries if library.version}
    found = [look_into(folder) for folder in dict.fromkeys((*roots.mounts, Path.cwd()))]
    return Facts(
        tpucache=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cores=count_cores(roots.cgroup),
        memory=measure_memory(roots.meminfo, roots.cgroup),
        shm=measure_space(roots.dev / "shm"),
        disk=measure_space(Path.cwd()),
        tpu=find_tpu(roots.sys, roots.dev),
        xla=ask_xla(environ) if xla and "torch_xla" in installed else None,
        environment={name: environ[name] for name in _VARIABLES if name in environ},
        libraries=libraries,
        decoders=find_decoders(),
        mounts=tuple(mount for mount in found if mount is not None),
        torch=ask_torch(environ) if xla and "torch" in installed else None,
    )
