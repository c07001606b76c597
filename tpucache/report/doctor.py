"""Finds out what this machine has for tpucache, and what to fix, for the command `doctor`.

Separate processes ask XLA and torch for their devices: if this process started XLA, every later fork would fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tpucache.errors import TpucacheError
from tpucache.loading.find import Search
from tpucache.loading.reading.maps import TEXTS, ShardMaps
from tpucache.machine import (
    Cores,
    Memory,
    Space,
    Tpu,
    count_cores,
    find_tpu,
    gpu_problem,
    measure_memory,
    measure_space,
    network_file_system,
)
from tpucache.redact import printable
from tpucache.store.cache import Cache
from tpucache.store.manifest import Manifest
from tpucache.units import size_text
from tpucache.version import __version__

#: Environment variables that change XLA or the workers.
_VARIABLES: Final = (
    "PJRT_DEVICE",
    "TPU_PROCESS_ADDRESSES",
    "TPU_VISIBLE_CHIPS",
    "CPU_NUM_DEVICES",
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "OMP_NUM_THREADS",
)


#: Where notebooks mount data.
_MOUNTS: Final = (Path("/kaggle/input"), Path("/kaggle/working"), Path("/content"))

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
    "nrtk-albumentations": "",
    "PyYAML": "augmentations in YAML files",
    "google-crc32c": "TFRecord sources",
    "protobuf": "TFRecord sources",
}

_SEARCH_SECONDS: Final = 5.0  # to search each folder, at most: a mounted drive may be too large
_OPENED: Final = 5  # files that are opened to measure the time, at least

#: Kaggle's TPU image sets this variable although there are no peers; libtpu would wait for them.
LOCAL: Final = ("TPU_PROCESS_ADDRESSES", "local")
_ASK_SECONDS: Final = 90.0
_ASK_XLA: Final = """
import json, torch_xla.runtime as runtime
from tpucache.wings import call, is_there
rates = [call("upload_rate")] if is_there("upload_rate") else []
print("found", json.dumps([runtime.device_type(), runtime.global_runtime_device_count(), *rates]))
"""
_ASK_TORCH: Final = """
import json, torch
found = []
for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    gpu = {"name": f"cuda: {torch.cuda.get_device_name(number)}", "error": ""}
    gpu |= {"capability": torch.cuda.get_device_capability(number), "architectures": torch.cuda.get_arch_list()}
    try:
        torch.ones(2, device=f"cuda:{number}").sum().item()
    except RuntimeError as error:
        gpu["error"] = str(error).splitlines()[0]
    found.append(gpu)
accelerator = getattr(torch, "accelerator", None)
if accelerator is not None and accelerator.is_available():
    # Asking for the kind and the number of devices does not start a TPU.
    kind, count = accelerator.current_accelerator().type, accelerator.device_count()
    found += [f"tpu: {count} chips"] if kind == "tpu" else []
print("found", json.dumps([*found, "cpu"]))
"""

_SMALL_SHM: Final = 1 << 30
_SMALL_MEMORY: Final = 2 << 30
_SMALL_DISK: Final = 5 << 30
_PAIR: Final = "torch==2.9.0 torch_xla==2.9.0"  # the last pair: torch_xla works with one release of torch only
_ALBUMENTATIONS: Final = "2.0.8"  # the last release under the MIT licence; warmup is pinned to it


@dataclass(frozen=True)
class Roots:
    """The paths of the kernel's files and of mounted folders; tests replace them."""

    meminfo: Path = Path("/proc/meminfo")
    cgroup: Path = Path("/sys/fs/cgroup")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    mounts: tuple[Path, ...] = _MOUNTS


@dataclass(frozen=True)
class Facts:
    """What a machine has: cores, memory, disk, devices, libraries and mounted folders.

    `shm` is the space in /dev/shm, and `disk` that of the current folder. `environment` has the variables that change
    XLA or the workers. `decoders` has the versions of image decoders by format. `xla` and `torch` are the devices that
    torch_xla and torch find. They are None if the library is not installed, or was not asked for its devices.
    """

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
        """Return a library's version; None if it is not installed."""
        return next((library.version for library in self.libraries if library.name == name), None)


def gather(roots: Roots | None = None, environ: Mapping[str, str] | None = None, *, xla: bool = True) -> Facts:
    """Return what this machine has.

    With `xla`, torch_xla and torch are also asked for their devices, if they are installed. This takes seconds. `roots`
    and `environ` replace the machine's own files and environment.
    """
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


@dataclass(frozen=True)
class Library:
    """A library: its `version`, None if it is not installed, and what tpucache needs it for."""

    name: str
    version: str | None
    needed_for: str


def find_libraries() -> tuple[Library, ...]:
    """Return the libraries in `_USES`, with their versions.

    A library for which `_USES` names no use is left out if it is not installed.
    """
    found = (Library(name, _version(name), use) for name, use in _USES.items())
    return tuple(library for library in found if library.version or library.needed_for)


def find_decoders() -> dict[str, str]:
    """Return the versions of simplejpeg and of Pillow's decoder for each format; "" for a missing decoder."""
    decoders = {"simplejpeg": _version("simplejpeg") or ""}
    try:
        from PIL import features
    except ImportError:
        return {**decoders, "JPEG": "", "PNG": ""}
    names = {"JPEG": ("libjpeg_turbo", "jpg"), "PNG": ("zlib_ng", "zlib"), "WebP": ("webp",), "AVIF": ("avif",)}
    names |= {"TIFF": ("libtiff",), "JPEG 2000": ("jpg_2000",)}
    for kind, parts in names.items():
        decoders[kind] = next((version for part in parts if (version := _feature(features, part))), "")
    return decoders


def _feature(features: object, part: str) -> str:
    try:
        return str(features.version(part) or "")  # type: ignore[attr-defined]  # a module, imported by the caller
    except ValueError:  # a part that this Pillow does not know
        return ""


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Mount:
    """A folder: its file system, whether it can be written to, and the caches in it as (path, samples).

    `reading` says for each cache how this machine would read its shards. `network` is the type of a network file
    system, None for a disk. `open_seconds` is the median time to open a file in the folder and read its first byte;
    None if the folder has no file.
    """

    space: Space
    writable: bool
    caches: tuple[tuple[str, int], ...]
    network: str | None = None
    reading: tuple[str, ...] = ()
    open_seconds: float | None = None


def look_into(folder: str | Path) -> Mount | None:
    """Return a folder's file system and the caches in it (see `Mount`), or None if there is no such folder.

    Caches are searched as by `find_cache`, but only for a few seconds.
    """
    space = measure_space(folder)
    if space is None:
        return None
    caches = tuple(sorted(_caches(Path(folder))))
    reading = tuple(_reading(path) for path, _ in caches)
    seconds = _open_seconds(Path(folder))
    return Mount(space, os.access(folder, os.W_OK), caches, network_file_system(folder), reading, seconds)


def _open_seconds(folder: Path) -> float | None:
    found: list[float] = []
    until = time.monotonic() + _SEARCH_SECONDS
    for above, _, names in os.walk(folder):
        for path in (Path(above, name) for name in names[:_OPENED]):
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    began = time.perf_counter()
                    with path.open("rb", buffering=0) as file:
                        file.read(1)
                    found.append(time.perf_counter() - began)
        if len(found) >= _OPENED or time.monotonic() > until:
            break
    return statistics.median(found) if found else None


def _caches(root: Path) -> Iterator[tuple[str, int]]:
    for found in Search([root], _SEARCH_SECONDS).caches():
        with contextlib.suppress(TpucacheError):  # other programs also have files named manifest.json
            yield str(found.path), Manifest.load(found.path).samples


def _reading(path: str) -> str:
    try:
        cache = Cache.open(path)
        return TEXTS[ShardMaps(cache.reader, 0).how_to_map(0)] if cache.manifest.shards else ""
    except TpucacheError:
        return ""


@dataclass(frozen=True)
class Xla:
    """The device that XLA finds and the number of its cores, or the error if XLA finds no device.

    `seconds` is the time that the start of XLA took. `upload` is the number of bytes a second that can be sent to the
    device, None if it was not measured.
    """

    device: str
    cores: int
    seconds: float
    error: str = ""
    upload: float | None = None


@dataclass(frozen=True)
class TorchDevices:
    """The devices that plain torch finds, the preferred device first, or the error if torch finds none.

    `broken` has the devices on which torch cannot run, each with the reason.
    """

    devices: tuple[str, ...]
    error: str = ""
    broken: tuple[str, ...] = ()


def ask_xla(
    environ: Mapping[str, str], seconds: float = _ASK_SECONDS, command: Sequence[str] = (sys.executable, "-c", _ASK_XLA)
) -> Xla:
    """Start XLA in a separate process with this environment, and return the device that it finds, or the error.

    `command` starts the process, which is stopped if it takes longer than `seconds`.
    """
    name, value = LOCAL
    environment = {key: text for key, text in environ.items() if (key, text) != (name, value)}  # as training does
    began = time.monotonic()
    found, error = _ask(environment, seconds, command)
    took = time.monotonic() - began
    if found is None:
        return Xla("", 0, took, error)
    return Xla(str(found[0]), int(found[1]), took, upload=float(found[2]) if len(found) > 2 else None)


def ask_torch(
    environ: Mapping[str, str],
    seconds: float = _ASK_SECONDS,
    command: Sequence[str] = (sys.executable, "-c", _ASK_TORCH),
) -> TorchDevices:
    """Import torch in a separate process with this environment, and return the devices that it finds, or the error.

    The process runs a kernel on each GPU. `command` starts it, and it is stopped if it takes longer than `seconds`.
    """
    found, error = _ask(environ, seconds, command)
    names, broken = [], []
    for entry in found or ():
        names.append(str(entry["name"] if isinstance(entry, dict) else entry))
        if isinstance(entry, dict):
            problem = gpu_problem(entry["capability"], entry["architectures"]) or entry["error"]
            broken += [f"{names[-1].removeprefix('cuda: ')}: {problem}"] if problem else []
    return TorchDevices(tuple(names), error, tuple(broken))


def _ask(environ: Mapping[str, str], seconds: float, command: Sequence[str]) -> tuple[list[Any] | None, str]:
    """Return the list that a program prints as JSON after the word `found`, and ""; None and the reason if it fails."""
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


@dataclass(frozen=True)
class Advice:
    """A problem, and what to do about it."""

    what: str
    remedy: str


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Return the problems to fix, the most important first."""
    return tuple(advice for check in _CHECKS for advice in check(facts))


def _check_environment(facts: Facts) -> Iterator[Advice]:
    name, value = LOCAL
    if facts.environment.get(name) == value:
        yield Advice(
            f"{name}={value} is set, and libtpu would wait for peers that are not there",
            f'`tpucache train` unsets it; in your own code, os.environ.pop("{name}") before importing torch_xla',
        )
    device = facts.environment.get("PJRT_DEVICE")
    if facts.tpu is not None and device is not None and device != "TPU":
        yield Advice(
            f"there is a TPU, but PJRT_DEVICE={device} keeps XLA from it", "`unset PJRT_DEVICE`, or set it to TPU"
        )


def _check_torch(facts: Facts) -> Iterator[Advice]:
    torch, xla = facts.version("torch"), facts.version("torch_xla")
    if torch is None:
        instead = "JAX" if facts.version("jax") else "numpy"
        yield Advice(
            f"torch is not installed: caches are read by {instead} (batches are arrays); train and predict need torch",
            "`pip install torch`, or leave torch out if you do not train or predict here",
        )
    has_other = facts.version("torch_tpu") is not None or (torch is None and facts.version("jax") is not None)
    if facts.tpu is not None and xla is None and not has_other:
        yield Advice("there is a TPU, but torch_xla is not installed", f"`pip install {_PAIR}`")
    if facts.tpu is not None and xla is not None and facts.version("libtpu") is None:
        yield Advice("there is a TPU, but libtpu is not installed", f"`pip install 'torch_xla[tpu]=={xla}'`")
    for problem in dict.fromkeys(() if facts.torch is None else facts.torch.broken):
        yield Advice(
            f"torch {torch} does not run on {printable(problem)}",
            "choose another accelerator (on Kaggle GPU T4 x2, with `train --processes 2`), or install a torch that is "
            "built for this GPU",
        )
    if torch and xla and _release(torch) != _release(xla):
        yield Advice(
            f"torch {torch} and torch_xla {xla} do not fit: torch_xla works with one release of torch only",
            f"`pip install torch=={_release(xla)}.*`, in a new environment if other programs need torch {torch}",
        )


def _check_xla(facts: Facts) -> Iterator[Advice]:
    if facts.xla is None:
        return
    if facts.xla.error:
        yield Advice(
            f"XLA does not start: {facts.xla.error}",
            "end other processes and notebooks that hold the TPU, or train with --backend torch",
        )
    elif facts.tpu is not None and facts.xla.device != "TPU":
        yield Advice(
            f"there is a TPU, but XLA runs on {facts.xla.device}",
            "install the libtpu that belongs to torch_xla, and leave PJRT_DEVICE unset",
        )


def _check_cores(facts: Facts) -> Iterator[Advice]:
    cores = facts.cores
    if cores.usable < cores.machine:
        yield Advice(
            f"this process may use {cores.usable} of the {cores.machine} cores that os.cpu_count() counts",
            f"warmup uses {cores.usable}; set OMP_NUM_THREADS={cores.usable} for libraries that would use more",
        )


def _check_memory(facts: Facts) -> Iterator[Advice]:
    memory = facts.memory
    if not memory.available:
        yield Advice(
            "the amount of free memory is unknown: /proc/meminfo does not have it",
            'give in_memory=True where a cache fits into memory: in_memory="auto" keeps nothing in memory here',
        )
    elif memory.available < _SMALL_MEMORY:
        yield Advice(
            f"{size_text(memory.available)} of memory are free",
            "end other programs; read with in_memory=False, and warm up with --jobs 1",
        )


def _check_space(facts: Facts) -> Iterator[Advice]:
    if facts.shm is not None and facts.shm.total < _SMALL_SHM:
        yield Advice(
            f"{facts.shm.path} has {size_text(facts.shm.total)}: when it is full, bus errors end DataLoader's worker "
            "processes",
            "read with CachedLoader, whose threads need no shared memory; or start the container with --shm-size 8g",
        )
    if facts.disk is not None and facts.disk.free < _SMALL_DISK:
        yield Advice(
            f"{size_text(facts.disk.free)} are free on the disk of {facts.disk.path}",
            "write the cache to another disk, or make the cache smaller by --codec dct-zstd",
        )


def _check_mounts(facts: Facts) -> Iterator[Advice]:
    for mount in facts.mounts:
        if mount.network is not None and mount.caches:
            yield Advice(
                f"the caches in {printable(mount.space.path)} lie on {mount.network}, across a network",
                "read the caches with --cache-dir (in Python cache_dir=) and a folder of a fast disk, or copy the "
                "caches to such a folder",
            )


def _check_libraries(facts: Facts) -> Iterator[Advice]:
    installed = facts.version("albumentations")
    if facts.version("albumentationsx"):
        yield Advice(
            "albumentationsx is installed: it is another library under albumentations' module name, AGPL-licensed",
            f"`pip uninstall -y albumentationsx && pip install --force-reinstall albumentations=={_ALBUMENTATIONS}`",
        )
    elif installed and installed != _ALBUMENTATIONS:
        yield Advice(
            f"albumentations {installed} is installed: presets may make other pixels than with {_ALBUMENTATIONS}",
            f"`pip install albumentations=={_ALBUMENTATIONS}`, or keep one version for a cache's whole life",
        )
    has_pillow = facts.version("pillow") is not None
    if not has_pillow:
        yield Advice(
            "Pillow is not installed: warmup cannot run, pictures cannot be drawn, JPEG and PNG records not decoded",
            "`pip install pillow`, or leave Pillow out if you only read caches of other codecs",
        )
    if has_pillow and facts.version("simplejpeg") is None:
        yield Advice("JPEG is decoded by Pillow, which is slower", "`pip install simplejpeg`")
    if has_pillow and facts.version("cykooz-resizer") is None:
        yield Advice("warmup resizes by Pillow, which is slower", "`pip install cykooz-resizer`")
    if facts.version("llvmlite") is None:
        yield Advice(
            "batches in memory are copied by numpy, and packed records are unpacked by numpy, which is slower",
            "`pip install llvmlite`",
        )


_CHECKS: Final[tuple[Callable[[Facts], Iterator[Advice]], ...]] = (
    _check_environment,
    _check_torch,
    _check_xla,
    _check_memory,
    _check_space,
    _check_mounts,
    _check_cores,
    _check_libraries,
)


def _release(version: str) -> str:
    """Return the first two numbers of a version, such as `2.9` for `2.9.0+cpu`."""
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])


@dataclass(frozen=True)
class Diagnosis:
    """What a machine has, and the problems to fix that follow from it."""

    facts: Facts
    advice: tuple[Advice, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what the machine has, and the problems to fix, as JSON values."""
        content = dataclasses.asdict(self.facts)
        content["cores"]["usable"] = self.facts.cores.usable
        content["libraries"] = {library.name: library.version for library in self.facts.libraries}
        content["advice"] = [dataclasses.asdict(advice) for advice in self.advice]
        return content

    def lines(self) -> list[str]:
        """Return what the machine has as lines of text, with the problems to fix last."""
        return [
            *_machine_lines(self.facts),
            *_software_lines(self.facts),
            *_mount_lines(self.facts),
            *self._advice_lines(),
        ]

    def _advice_lines(self) -> list[str]:
        if not self.advice:
            return ["", "nothing to fix"]
        lines = ["", f"to fix: {len(self.advice)}"]
        for number, advice in enumerate(self.advice, 1):
            lines += [f"{number:>3}. {printable(advice.what)}", f"     -> {printable(advice.remedy)}"]
        return lines


def diagnose(roots: Roots | None = None, environ: Mapping[str, str] | None = None, *, xla: bool = True) -> Diagnosis:
    """Return what this machine has, and the problems to fix.

    With `xla`, separate processes ask torch_xla and torch for their devices. `roots` and `environ` replace the
    machine's own files and environment.
    """
    facts = gather(roots, environ, xla=xla)
    return Diagnosis(facts, advise(facts))


def _machine_lines(facts: Facts) -> list[str]:
    lines = [
        f"tpucache     {facts.tpucache}, Python {facts.python}, {facts.platform}",
        f"cores        {_cores_text(facts.cores)}",
        f"memory       {_memory_text(facts.memory)}",
        f"shared       {_space_text(facts.shm)}, in /dev/shm",
        f"disk here    {_space_text(facts.disk)}",
        f"TPU          {_tpu_text(facts)}",
        f"XLA          {_xla_text(facts)}",
        f"torch        {_torch_text(facts)}",
    ]
    names = [f"{name}={value}" for name, value in facts.environment.items()]
    return [*lines, f"environment  {printable(', '.join(names)) or 'no variable that XLA reads is set'}"]


def _software_lines(facts: Facts) -> list[str]:
    lines = ["", "libraries"]
    for library in facts.libraries:
        version = library.version or "-"
        note = "" if library.version else f"not installed: needed for {library.needed_for}"
        lines.append(f"  {library.name:<16} {version:<10} {note}".rstrip())
    decoders = [f"{kind} {version}" for kind, version in facts.decoders.items() if version]
    missing = [kind for kind, version in facts.decoders.items() if not version]
    without = f"; none of {', '.join(missing)}" if missing else ""
    return [*lines, f"decoders     {', '.join(decoders) or 'none'}{without}"]


def _mount_lines(facts: Facts) -> list[str]:
    lines = ["", "mounts"]
    for mount in facts.mounts:
        lines.append(f"  {printable(mount.space.path)}: {_mount_text(mount)}")
        for (path, samples), reading in zip(mount.caches, mount.reading, strict=True):
            lines.append(f"    cache {printable(path)}: {samples:,} samples{reading and ', '}{reading}")
    return lines


def _cores_text(cores: Cores) -> str:
    parts = [f"{cores.usable} usable", f"{cores.machine} in the machine", f"{cores.affinity} by affinity"]
    parts.append("no quota" if cores.quota is None else f"{cores.quota:g} by the container's quota")
    return ", ".join(parts)


def _memory_text(memory: Memory) -> str:
    if not memory.machine:
        return "not known"
    limit = "no limit by a container" if memory.limit is None else f"{size_text(memory.limit)} the container's limit"
    return f"{size_text(memory.available)} available, {size_text(memory.machine)} in the machine, {limit}"


def _space_text(space: Space | None) -> str:
    return "not there" if space is None else f"{size_text(space.free)} free of {size_text(space.total)}"


def _mount_text(mount: Mount) -> str:
    opening = "" if mount.open_seconds is None else f", a file opens in {1e3 * mount.open_seconds:.1f} ms"
    kind = "writable" if mount.writable else "read-only"
    return f"{_space_text(mount.space)}, {kind}, {len(mount.caches):,} caches{opening}"


def _tpu_text(facts: Facts) -> str:
    if facts.tpu is None:
        return "none on the PCI bus"
    return f"{facts.tpu.chips} chips, {facts.tpu.generation}, by {', '.join(facts.tpu.devices) or 'no device files'}"


def _torch_text(facts: Facts) -> str:
    if facts.version("torch") is None:
        return "not installed"
    if facts.torch is None:
        return "not asked"
    if facts.torch.error:
        return f"does not start: {printable(facts.torch.error)}"
    return printable(", ".join(facts.torch.devices))


def _xla_text(facts: Facts) -> str:
    if facts.version("torch_xla") is None:
        return "torch_xla is not installed"
    if facts.xla is None:
        return "not asked"
    if facts.xla.error:
        return f"does not start: {printable(facts.xla.error)}"
    upload = "" if facts.xla.upload is None else f", batches are sent to it at {facts.xla.upload / 1e9:,.2f} GB/s"
    return f"{facts.xla.device}, cores: {facts.xla.cores}, started in {facts.xla.seconds:.1f} s{upload}"
