"""What to fix on a machine: a pure function of its facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tpucache.report.doctor.accelerator import LOCAL
from tpucache.report.doctor.facts import Facts
from tpucache.report.text import size_text

_SMALL_SHM: Final = 1 << 30
_SMALL_MEMORY: Final = 2 << 30
_SMALL_DISK: Final = 5 << 30
_XLA: Final = "torch==2.9.0 torch_xla==2.9.0"  # torch_xla works with one release of torch only; this is the last pair
_ALBUMENTATIONS: Final = "2.0.8"  # the last one under the MIT licence, which warmup is pinned to


@dataclass(frozen=True)
class Advice:
    """One thing that is not as it should be, and what to do about it."""

    what: str
    remedy: str


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Return what to fix, the most important first; nothing where all is well."""
    return tuple(advice for check in _CHECKS for advice in check(facts))


def _environment(facts: Facts) -> Iterator[Advice]:
    name, value = LOCAL
    if facts.environment.get(name) == value:
        yield Advice(
            f"{name}={value} is set, and libtpu would wait for peers that are not there",
            f'`python -m tpucache train` removes it; in your own code os.environ.pop("{name}") before '
            "torch_xla is imported",
        )
    device = facts.environment.get("PJRT_DEVICE")
    if facts.tpu is not None and device is not None and device != "TPU":
        yield Advice(
            f"there is a TPU, but PJRT_DEVICE={device} keeps XLA from it", "`unset PJRT_DEVICE`, or set it to TPU"
        )


def _torch(facts: Facts) -> Iterator[Advice]:
    torch, xla = facts.version("torch"), facts.version("torch_xla")
    if torch is None:
        instead = "JAX" if facts.version("jax") else "numpy"
        yield Advice(
            f"torch is not installed: caches are read by {instead} (batches are arrays); train and predict need torch",
            "`pip install torch`, or leave it out if you do not need these",
        )
    has_other = facts.version("torch_tpu") is not None or (torch is None and facts.version("jax") is not None)
    if facts.tpu is not None and xla is None and not has_other:
        yield Advice("there is a TPU, but torch_xla is not installed", f"`pip install {_XLA}`")
    if facts.tpu is not None and xla is not None and facts.version("libtpu") is None:
        yield Advice("there is a TPU, but libtpu is not installed", f"`pip install 'torch_xla[tpu]=={xla}'`")
    if torch and xla and _release(torch) != _release(xla):
        yield Advice(
            f"torch {torch} and torch_xla {xla} do not fit: torch_xla works with one release of torch only",
            f"`pip install torch=={_release(xla)}.*`, in an environment of its own if others need that torch",
        )


def _xla(facts: Facts) -> Iterator[Advice]:
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


def _cores(facts: Facts) -> Iterator[Advice]:
    cores = facts.cores
    if cores.usable < cores.machine:
        yield Advice(
            f"{cores.usable} of the {cores.machine} cores that os.cpu_count() counts are for this process",
            f"warmup counts correctly; set OMP_NUM_THREADS={cores.usable} for libraries that do not",
        )


def _memory(facts: Facts) -> Iterator[Advice]:
    memory = facts.memory
    if not memory.available:
        yield Advice(
            "how much memory is free cannot be learnt: /proc/meminfo does not say",
            'give in_memory=True yourself where a cache fits: "auto" keeps nothing in memory here',
        )
    elif memory.available < _SMALL_MEMORY:
        yield Advice(
            f"{size_text(memory.available)} of memory are free",
            "end what else runs; read with in_memory=False, and warm up with --jobs 1",
        )


def _space(facts: Facts) -> Iterator[Advice]:
    if facts.shm is not None and facts.shm.total < _SMALL_SHM:
        yield Advice(
            f"{facts.shm.path} has {size_text(facts.shm.total)}: when it is full, DataLoader's worker processes die of "
            "bus errors",
            "read with CachedLoader, whose threads do not need it; or start the container with --shm-size 8g",
        )
    if facts.disk is not None and facts.disk.free < _SMALL_DISK:
        yield Advice(
            f"{size_text(facts.disk.free)} are free on the disk of {facts.disk.path}",
            "write the cache elsewhere, or make it smaller by --codec jpeg",
        )


def _libraries(facts: Facts) -> Iterator[Advice]:
    installed = facts.version("albumentations")
    if facts.version("albumentationsx"):
        yield Advice(
            "albumentationsx is installed: it is another library under albumentations' module name, AGPL-licensed",
            f"`pip uninstall -y albumentationsx && pip install --force-reinstall albumentations=={_ALBUMENTATIONS}`",
        )
    elif installed and installed != _ALBUMENTATIONS:
        yield Advice(
            f"albumentations {installed} is installed: presets may make other pixels than {_ALBUMENTATIONS} does",
            f"`pip install albumentations=={_ALBUMENTATIONS}`, or keep one version for a cache's whole life",
        )
    has_pillow = facts.version("pillow") is not None
    if not has_pillow:
        yield Advice(
            "Pillow is not installed: warmup and pictures cannot be made, JPEG and PNG records cannot be decoded",
            "`pip install pillow`, or leave it out where caches of other codecs are only read",
        )
    if has_pillow and facts.version("simplejpeg") is None:
        yield Advice("JPEG is decoded by Pillow, which is slower", "`pip install simplejpeg`")
    if has_pillow and facts.version("cykooz-resizer") is None:
        yield Advice("warmup resizes by Pillow, which is slower", "`pip install cykooz-resizer`")
    if facts.version("llvmlite") is None:
        yield Advice(
            "batches kept in memory are copied by numpy, and packed records unpacked by it, which is slower",
            "`pip install llvmlite`",
        )


_CHECKS: Final[tuple[Callable[[Facts], Iterator[Advice]], ...]] = (
    _environment,
    _torch,
    _xla,
    _memory,
    _space,
    _cores,
    _libraries,
)


def _release(version: str) -> str:
    """Return `2.9` of `2.9.0+cpu`."""
    return ".".join(version.split("+", maxsplit=1)[0].split(".")[:2])
