"""Finds out what this machine has for tpucache, and what to fix, for the command `doctor`.

Separate processes ask XLA and torch for their devices: if this process started XLA, every later fork would fail.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tpucache.machine import (
    Cores,
    Memory,
    Space,
    Tpu,
    count_cores,
    find_tpu,
    measure_memory,
    measure_space,
    network_file_system,
)
from tpucache.text import printable, size_text
from tpucache.version import __version__

#: Environment variables that change XLA or the workers.
_VARIABLES: Final = (
    *("PJRT_DEVICE", "TPU_PROCESS_ADDRESSES", "TPU_VISIBLE_CHIPS", "CPU_NUM_DEVICES"),
    *("XLA_FLAGS", "LIBTPU_INIT_ARGS", "OMP_NUM_THREADS"),
)
#: Where notebooks mount data.
_MOUNTS: Final = ("kaggle/input", "kaggle/working", "content")

#: The distributions that tpucache uses, and for what; "" for distributions that are only shown if they are installed.
_USES: Final = {
    "numpy": "everything",
    "torch": "training; batches as tensors, without it as arrays",
    "jax": "",
    "torch_xla": "training on a TPU",
    "libtpu": "reaching a TPU",
    "torch_tpu": "",
    "pillow": "warmup, preview, report, PNG records",
    "simplejpeg": "decoding JPEG fast",
    "cykooz-resizer": "resizing fast in warmup",
    "llvmlite": "copying and unpacking batches fast",
    "jinja2": "report, publish",
    "zstandard": "zstd records",
    "lmdb": "warmup",
    "joblib": "warmup",
    "tqdm": "warmup's progress bar",
    "albumentations": "augmented variants in warmup",
    "albumentationsx": "",
    "PyYAML": "augmentations in YAML files",
    "google-crc32c": "TFRecord sources",
    "protobuf": "TFRecord sources",
}

#: Kaggle's TPU image sets this variable although there are no peers; libtpu would wait for them.
_LOCAL: Final = ("TPU_PROCESS_ADDRESSES", "local")
_ASK_XLA: Final = """
import json, torch_xla.runtime as runtime
from tpucache.plugins import call, is_there
rate = call("upload_rate") if is_there("upload_rate") else None
found = {"device": runtime.device_type(), "cores": runtime.global_runtime_device_count(), "upload": rate}
print("found", json.dumps(found))
"""
_ASK_TORCH: Final = """
import json, torch
from tpucache.machine import gpu_problem
devices, broken = [], []
for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    name, problem = torch.cuda.get_device_name(number), ""
    try:
        torch.ones(2, device=f"cuda:{number}").sum().item()
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    problem = gpu_problem(torch.cuda.get_device_capability(number), torch.cuda.get_arch_list()) or problem
    devices.append(f"cuda: {name}")
    broken += [f"{name}: {problem}"] if problem else []
accelerator = getattr(torch, "accelerator", None)
if accelerator is not None and accelerator.is_available():
    # Asking for the kind and the number of devices does not start a TPU.
    kind, count = accelerator.current_accelerator().type, accelerator.device_count()
    devices += [f"tpu: {count} chips"] if kind == "tpu" else []
print("found", json.dumps({"devices": [*devices, "cpu"], "broken": broken}))
"""

_SMALL_SHM: Final = 1 << 30
_SMALL_MEMORY: Final = 2 << 30
_SMALL_DISK: Final = 5 << 30
_PLENTY: Final = Space("", 1 << 60, 1 << 60)  # of what is not there
_ALBUMENTATIONS: Final = "2.0.8"  # the last release under the MIT licence; warmup is pinned to it


@dataclass(frozen=True)
class Mount:
    """A folder: its file system; `network` is the type of a network file system."""

    space: Space
    writable: bool
    network: str | None


@dataclass(frozen=True)
class Diagnosis:
    """What a machine has; `xla` and `torch` are None if they are not installed or were not asked for their devices."""

    tpucache: str
    python: str
    platform: str
    cores: Cores
    memory: Memory
    shm: Space | None
    disk: Space | None
    tpu: Tpu | None
    xla: Mapping[str, Any] | None
    torch: Mapping[str, Any] | None
    environment: Mapping[str, str]
    libraries: Mapping[str, str]
    mounts: Sequence[Mount]

    @property
    def advice(self) -> list[tuple[str, str]]:
        """The problems to fix, the most important first, each with what to do about it."""
        return [*_check_devices(self), *_check_machine(self), *_check_libraries(self.libraries)]

    def to_dict(self) -> dict[str, Any]:
        content = dataclasses.asdict(self)
        content["cores"]["usable"] = self.cores.usable
        return {**content, "advice": [{"what": what, "remedy": remedy} for what, remedy in self.advice]}

    def lines(self) -> list[str]:
        """Return what the machine has as lines of text, with the problems to fix last."""
        lines = [f"{name:<12} {text}" for name, text in _machine_texts(self).items()]
        lines += ["", "libraries"]
        lines += [
            f"  {name:<16} {version or f'-          not installed: needed for {_USES[name]}'}"
            for name, version in self.libraries.items()
            if version or _USES.get(name)
        ]
        lines += ["", "mounts"]
        lines += [
            f"  {mount.space.path}: {_space_text(mount.space)}, {'writable' if mount.writable else 'read-only'}"
            for mount in self.mounts
        ]
        advice = self.advice
        lines += ["", f"to fix: {len(advice)}" if advice else "nothing to fix"]
        for number, (what, remedy) in enumerate(advice, 1):
            lines += [f"{number:>3}. {what}", f"     -> {remedy}"]
        return list(map(printable, lines))


def diagnose(root: Path = Path("/"), environ: Mapping[str, str] | None = None, *, xla: bool = True) -> Diagnosis:
    """Return what this machine has, and the problems to fix. `root` has the kernel's files and the mounted folders.

    With `xla`, torch_xla and torch are asked for their devices, which takes seconds.
    """
    environ = os.environ if environ is None else environ
    libraries = {name: _version(name) for name in _USES}
    folders = dict.fromkeys((*(root / mount for mount in _MOUNTS), Path.cwd()))
    # libtpu would wait for peers
    alone = {name: text for name, text in environ.items() if (name, text) != _LOCAL}
    return Diagnosis(
        tpucache=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cores=count_cores(root / "sys/fs/cgroup"),
        memory=measure_memory(root / "proc/meminfo", root / "sys/fs/cgroup"),
        shm=measure_space(root / "dev/shm"),
        disk=measure_space(Path.cwd()),
        tpu=find_tpu(root / "sys", root / "dev"),
        xla=ask(_ASK_XLA, alone) if xla and libraries["torch_xla"] else None,
        torch=ask(_ASK_TORCH, environ) if xla and libraries["torch"] else None,
        environment={name: environ[name] for name in _VARIABLES if name in environ},
        libraries=libraries,
        mounts=[
            Mount(space, os.access(folder, os.W_OK), network_file_system(folder))
            for folder in folders
            if (space := measure_space(folder)) is not None
        ],
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def ask(code: str, environ: Mapping[str, str], seconds: float = 90.0) -> dict[str, Any]:
    """Run a program in a separate process, and return the object that it prints as JSON after the word `found`.

    The result also has the `seconds` that it took, and an `error`.
    """
    began = time.monotonic()
    try:
        done = subprocess.run(  # noqa: S603  # this Python, with one of the programs above
            [sys.executable, "-c", code],
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
        answers = [line.removeprefix("found ") for line in done.stdout.splitlines() if line.startswith("found ")]
        reasons = [f"ended with status {done.returncode}", *filter(None, map(str.strip, done.stderr.splitlines()))]
        answer = json.loads(answers[0]) if answers else {"error": reasons[-1]}
    except subprocess.TimeoutExpired:
        answer = {"error": f"no answer in {seconds:,.0f} s"}
    return {"error": "", **answer, "seconds": time.monotonic() - began}


# Checks: each yields what is wrong, and what to do about it.

_Checks = Iterator[tuple[str, str]]


def _check_devices(facts: Diagnosis) -> _Checks:
    torch, xla, libtpu, jax, other = map(facts.libraries.get, ("torch", "torch_xla", "libtpu", "jax", "torch_tpu"))
    device, found = facts.environment.get("PJRT_DEVICE", "TPU"), facts.xla or {}
    name, value = _LOCAL
    if facts.environment.get(name) == value:
        yield (
            f"{name}={value} is set, and libtpu would wait for peers that are not there",
            f'`tpucache train` unsets it; in your own code, os.environ.pop("{name}") before importing torch_xla',
        )
    if not torch:
        yield (
            f"torch is not installed: caches are read by {'JAX' if jax else 'numpy'} (batches are arrays); train and "
            "predict need torch",
            "`pip install torch`, or leave torch out if you do not train or predict here",
        )
    for problem in dict.fromkeys((facts.torch or {}).get("broken", ())):
        yield (
            f"torch {torch} does not run on {problem}",
            "choose another accelerator (on Kaggle GPU T4 x2, with `train --processes 2`), or install a torch that is "
            "built for this GPU",
        )
    release = ".".join((xla or "").split(".")[:2])
    if torch and xla and not torch.startswith(f"{release}."):
        yield (
            f"torch {torch} and torch_xla {xla} do not fit: torch_xla works with one release of torch only",
            f"`pip install torch=={release}.*`, in a new environment if other programs need torch {torch}",
        )
    if found.get("error"):
        yield (
            f"XLA does not start: {found['error']}",
            "end other processes and notebooks that hold the TPU, or train with --backend torch",
        )
    if facts.tpu is None:
        return
    if device != "TPU":
        yield (
            f"there is a TPU, but PJRT_DEVICE={device} keeps XLA from it",
            "`unset PJRT_DEVICE`, or set it to TPU",
        )
    if torch and not xla and not other:
        # the last pair: torch_xla works with one release of torch only
        yield "there is a TPU, but torch_xla is not installed", "`pip install torch==2.9.0 torch_xla==2.9.0`"
    if xla and not libtpu:
        yield "there is a TPU, but libtpu is not installed", f"`pip install 'torch_xla[tpu]=={xla}'`"
    if found.get("device", "TPU") != "TPU":
        yield (
            f"there is a TPU, but XLA runs on {found['device']}",
            "install the libtpu that belongs to torch_xla, and leave PJRT_DEVICE unset",
        )


def _check_machine(facts: Diagnosis) -> _Checks:
    cores, free, shm, disk = facts.cores, facts.memory.available, facts.shm or _PLENTY, facts.disk or _PLENTY
    if not free:
        yield (
            "the amount of free memory is unknown: /proc/meminfo does not have it",
            'give in_memory=True where a cache fits into memory: in_memory="auto" keeps nothing in memory here',
        )
    elif free < _SMALL_MEMORY:
        yield (
            f"{size_text(free)} of memory are free",
            "end other programs; read with in_memory=False, and warm up with --jobs 1",
        )
    if shm.total < _SMALL_SHM:
        yield (
            f"{shm.path} has {size_text(shm.total)}: when it is full, bus errors end DataLoader's worker processes",
            "read with CachedLoader, whose threads need no shared memory; or start the container with --shm-size 8g",
        )
    if disk.free < _SMALL_DISK:
        yield (
            f"{size_text(disk.free)} are free on the disk of {disk.path}",
            "write the cache to another disk, or make the cache smaller by --codec dct-zstd",
        )
    for mount in facts.mounts:
        if mount.network:
            yield (
                f"{mount.space.path} is on {mount.network}, across a network",
                "read the caches in it with --cache-dir (in Python cache_dir=) and a folder of a fast disk, or copy "
                "them to such a folder",
            )
    if cores.usable < cores.machine:
        yield (
            f"this process may use {cores.usable} of the {cores.machine} cores that os.cpu_count() counts",
            f"warmup uses {cores.usable}; set OMP_NUM_THREADS={cores.usable} for libraries that would use more",
        )


def _check_libraries(libraries: Mapping[str, str]) -> _Checks:
    pillow, installed, other = map(libraries.get, ("pillow", "albumentations", "albumentationsx"))
    if other:
        yield (
            "albumentationsx is installed: it is another library under albumentations' module name, AGPL-licensed",
            f"`pip uninstall -y albumentationsx && pip install --force-reinstall albumentations=={_ALBUMENTATIONS}`",
        )
    elif installed and installed != _ALBUMENTATIONS:
        yield (
            f"albumentations {installed} is installed: presets may make other pixels than with {_ALBUMENTATIONS}",
            f"`pip install albumentations=={_ALBUMENTATIONS}`, or keep one version for a cache's whole life",
        )
    if not pillow:
        yield (
            "Pillow is not installed: warmup cannot run, pictures cannot be drawn, JPEG and PNG records not decoded",
            "`pip install pillow`, or leave Pillow out if you only read caches of other codecs",
        )
    slower = {"llvmlite": "batches in memory are copied by numpy, and packed records are unpacked by numpy"}
    if pillow:
        slower |= {"simplejpeg": "JPEG is decoded by Pillow", "cykooz-resizer": "warmup resizes by Pillow"}
    for name, what in slower.items():
        if not libraries.get(name):
            yield f"{what}, which is slower", f"`pip install {name}`"


# Texts.


def _machine_texts(facts: Diagnosis) -> dict[str, str]:
    cores, memory, tpu = facts.cores, facts.memory, facts.tpu
    quota = "no quota" if cores.quota is None else f"{cores.quota:g} by the container's quota"
    limit = "no limit by a container" if memory.limit is None else f"{size_text(memory.limit)} the container's limit"
    files = "" if tpu is None else ", ".join(tpu.devices) or "no device files"
    return {
        "tpucache": f"{facts.tpucache}, Python {facts.python}, {facts.platform}",
        "cores": f"{cores.usable} usable, {cores.machine} in the machine, {cores.affinity} by affinity, {quota}",
        "memory": f"{size_text(memory.available)} available, {size_text(memory.machine)} in the machine, {limit}",
        "shared": f"{_space_text(facts.shm)}, in /dev/shm",
        "disk here": _space_text(facts.disk),
        "TPU": "none on the PCI bus" if tpu is None else f"{tpu.chips} chips, {tpu.generation}, by {files}",
        "XLA": _found_text(facts, "torch_xla", facts.xla),
        "torch": _found_text(facts, "torch", facts.torch),
        "environment": ", ".join(f"{name}={value}" for name, value in facts.environment.items())
        or "no variable that XLA reads is set",
    }


def _space_text(space: Space | None) -> str:
    return "not there" if space is None else f"{size_text(space.free)} free of {size_text(space.total)}"


def _found_text(facts: Diagnosis, library: str, found: Mapping[str, Any] | None) -> str:
    if not facts.libraries.get(library):
        return f"{library} is not installed"
    if found is None:
        return "not asked"
    if found["error"]:
        return f"does not start: {found['error']}"
    if "devices" in found:
        return ", ".join(found["devices"])
    upload = f", batches are sent to it at {found['upload'] / 1e9:,.2f} GB/s" if found["upload"] else ""
    return f"{found['device']}, cores: {found['cores']}, started in {found['seconds']:.1f} s{upload}"
