"""Virtual environments of benchmarks and checks, made once in a work folder and found again by the next run."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.commands import run_logged, say

#: Runs a command that writes into a log.
Run = Callable[[Sequence[str | Path], Path], None]


@dataclass(frozen=True)
class Environment:
    """What an environment holds.

    `installs` are pip's arguments, a call each, under `constraints`. `python` is the interpreter that makes it.
    `inherits` adds the packages of the environment that this process runs in; `links` adds single ones of them, with
    what they require. It is made anew when any of this changes, or one of the files that it `depends_on`.
    """

    name: str
    installs: tuple[tuple[str, ...], ...] = ()
    constraints: tuple[str, ...] = ()
    python: str = sys.executable
    inherits: bool = False
    links: tuple[str, ...] = ()
    depends_on: tuple[Path, ...] = ()

    @property
    def packages(self) -> list[str]:
        """The names of what is installed."""
        words = [word for install in self.installs for word in install if not word.startswith("-")]
        return [re.split(r"[=<>\[]", word)[0].lower().replace("_", "-") for word in words]

    @property
    def fingerprint(self) -> str:
        """What has to be the same for an environment on the disk to be this one."""
        fields = {**dataclasses.asdict(self), "depends_on": [_sha256(path) for path in self.depends_on]}
        return json.dumps(fields)


class Environments:
    """The environments in one folder. None means the one that this process runs in."""

    def __init__(self, folder: Path, logs: Path | None = None, run: Run = run_logged) -> None:
        self._folder, self._run = folder.absolute(), run
        self._logs = (logs or folder / "log").absolute()
        for path in (self._folder, self._logs):
            path.mkdir(parents=True, exist_ok=True)

    def python(self, environment: Environment | None) -> Path:
        """Return the interpreter of an environment that was prepared."""
        return self._folder / environment.name / "bin" / "python" if environment else Path(sys.executable)

    def prepare(self, environment: Environment | None) -> Path:
        """Return the interpreter of an environment, which is made unless it is there. Raises CommandError."""
        if environment:
            finished = self._folder / environment.name / "installed.json"
            if not finished.exists() or finished.read_text() != environment.fingerprint:
                self._make(environment)
                finished.write_text(environment.fingerprint)
        return self.python(environment)

    def versions(self, environment: Environment | None, packages: Sequence[str]) -> dict[str, str]:
        """Return the versions of those of some packages that an environment holds."""
        python = self.python(environment)
        command: list[str | Path] = [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
        listed = subprocess.run(command, check=False, capture_output=True, text=True)
        if listed.returncode:
            return {}
        found = {row["name"].lower().replace("_", "-"): row["version"] for row in json.loads(listed.stdout)}
        return {name: found[name] for name in packages if name in found}

    def _make(self, environment: Environment) -> None:
        folder = self._folder / environment.name
        say(f"installing {environment.name} into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        log = self._logs / f"install-{environment.name}.log"
        self._run([environment.python, "-m", "venv", folder], log)
        (packages,) = folder.glob("lib/python*/site-packages")
        if environment.inherits:
            lines = (f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
            (packages / "inherited.pth").write_text("".join(lines))
        link(environment.links, packages)
        pip: list[str | Path] = [self.python(environment), "-m", "pip", "install", "--quiet"]
        if environment.constraints:
            listed = folder / "constraints.txt"
            listed.write_text("".join(f"{line}\n" for line in environment.constraints))
            pip += ["--constraint", listed]
        for install in environment.installs:
            self._run([*pip, *install], log)


def link(names: Sequence[str], packages: Path) -> None:
    """Link installed distributions, and all that they require, into a site-packages folder."""
    for distribution in _closure(names):
        tops = {path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            target = Path(str(distribution.locate_file(top)))
            if target.exists() and not (packages / top).exists():
                (packages / top).symlink_to(target)


def _closure(names: Sequence[str]) -> list[importlib.metadata.Distribution]:
    """Return installed distributions and all that they require here."""
    from packaging.requirements import Requirement

    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # required of another platform's torch only
            continue
        needs = [Requirement(text) for text in found[name].requires or ()]
        waiting += [need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
    return list(found.values())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
