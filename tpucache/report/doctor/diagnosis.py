"""What this machine has for tpucache and what to fix, as lines for people and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpucache.machine import Cores, Memory, Space
from tpucache.redact import printable
from tpucache.report.doctor.advice import Advice, advise
from tpucache.report.doctor.facts import Facts, Roots, gather
from tpucache.report.doctor.mounts import Mount
from tpucache.report.text import size_text


@dataclass(frozen=True)
class Diagnosis:
    """The facts of a machine, and what follows from them."""

    facts: Facts
    advice: tuple[Advice, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        content = dataclasses.asdict(self.facts)
        content["cores"]["usable"] = self.facts.cores.usable
        content["libraries"] = {library.name: library.version for library in self.facts.libraries}
        content["advice"] = [dataclasses.asdict(advice) for advice in self.advice]
        return content

    def lines(self) -> list[str]:
        """Return all of it as lines, the advice last, where it is read."""
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
    """Gather what this machine has and say what to fix; with `xla`, ask XLA and torch in separate processes, too.

    `roots` and `environ` are where to look instead of the machine's own files and environment.
    """
    facts = gather(roots, environ, xla=xla)
    return Diagnosis(facts, advise(facts))


def _machine_lines(facts: Facts) -> list[str]:
    lines = [
        f"tpucache     {facts.tpucache}, Python {facts.python}, {facts.platform}",
        f"cores        {_cores(facts.cores)}",
        f"memory       {_memory(facts.memory)}",
        f"shared       {_space(facts.shm)}, in /dev/shm",
        f"disk here    {_space(facts.disk)}",
        f"TPU          {_tpu(facts)}",
        f"XLA          {_xla(facts)}",
        f"torch        {_torch(facts)}",
    ]
    names = [f"{name}={value}" for name, value in facts.environment.items()]
    return [*lines, f"environment  {printable(', '.join(names)) or 'none of the variables that XLA reads is set'}"]


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
        lines.append(f"  {printable(mount.space.path)}: {_mount(mount)}")
        lines += [f"    cache {printable(path)}: {samples:,} samples" for path, samples in mount.caches]
    return lines


def _cores(cores: Cores) -> str:
    parts = [f"{cores.usable} usable", f"{cores.machine} in the machine", f"{cores.affinity} by affinity"]
    parts.append("no quota" if cores.quota is None else f"{cores.quota:g} by the container's quota")
    return ", ".join(parts)


def _memory(memory: Memory) -> str:
    if not memory.machine:
        return "not known"
    limit = "no limit by a container" if memory.limit is None else f"{size_text(memory.limit)} the container's limit"
    return f"{size_text(memory.available)} available, {size_text(memory.machine)} in the machine, {limit}"


def _space(space: Space | None) -> str:
    return "not there" if space is None else f"{size_text(space.free)} free of {size_text(space.total)}"


def _mount(mount: Mount) -> str:
    return f"{_space(mount.space)}, {'writable' if mount.writable else 'read-only'}, {len(mount.caches):,} caches"


def _tpu(facts: Facts) -> str:
    if facts.tpu is None:
        return "none on the PCI bus"
    return f"{facts.tpu.chips} chips, {facts.tpu.generation}, by {', '.join(facts.tpu.devices) or 'no device files'}"


def _torch(facts: Facts) -> str:
    if facts.version("torch") is None:
        return "not installed"
    if facts.torch is None:
        return "not asked"
    if facts.torch.error:
        return f"does not start: {printable(facts.torch.error)}"
    return printable(", ".join(facts.torch.devices))


def _xla(facts: Facts) -> str:
    if facts.version("torch_xla") is None:
        return "torch_xla is not installed"
    if facts.xla is None:
        return "not asked"
    if facts.xla.error:
        return f"does not start: {printable(facts.xla.error)}"
    return f"{facts.xla.device}, cores: {facts.xla.cores}, started in {facts.xla.seconds:.1f} s"
