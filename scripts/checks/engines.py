"""Whether warmup by each engine writes the files of a local run, also where a worker is killed in the middle.

Ray is installed into an environment of its own, above the one that this runs in.
The table is that of docs/clusters.md; each engine runs two workers on this machine.

    python -m scripts.checks engines
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from scripts.commands import ROOT, CommandError, say
from scripts.environments import Environment, Environments

_PATIENCE_SECONDS: Final = 900
_NOT_KILLED: Final = "no worker was killed"


@dataclass(frozen=True)
class Engine:
    """An engine as `engine_trial` takes it, the package that is its library, and whether it has to be installed."""

    name: str
    package: str
    is_installed: bool = False

    @property
    def environment(self) -> Environment | None:
        """What the package is installed into; None where the tests' own environment holds it."""
        pins = tuple(f"{name}=={version(name)}" for name in ("numpy", "joblib"))
        return None if self.is_installed else Environment(self.package, ((self.package,),), pins, inherits=True)


ENGINES: Final = (
    Engine("loky", "joblib", is_installed=True),
    Engine("dask", "distributed", is_installed=True),
    Engine("ray", "ray"),
)


def main() -> None:
    """Run the check as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the environments there, for the next run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as aside:
        environments = Environments(options.work or Path(aside))
        rows = [_try(engine, environments) for engine in ENGINES]
    print(f"\n{'':<18}{'version':<22}{'same files':<12}{'kept':>5}{'same again':>12}  when a worker is killed")
    for name, release, is_equal, kept, is_equal_then, then in rows:
        print(f"{name:<18}{release:<22}{is_equal:<12}{kept:>5}{is_equal_then:>12}  {then}")
    sys.exit(any(row[2:5:2] != ("yes", "yes") or row[-1] == _NOT_KILLED for row in rows))


def _try(engine: Engine, environments: Environments) -> tuple[str, ...]:
    """Return a row: name, release, whether files are the same, samples kept of a run with a kill, the same after it."""
    say(f"{engine.name} …")
    try:
        python = environments.prepare(engine.environment)
    except CommandError as error:
        return engine.name, "", "", "", "", f"cannot be installed: {error}"
    found = environments.versions(engine.environment, [engine.package]) if engine.environment else {}
    release = f"{engine.package} {found.get(engine.package) or version(engine.package)}"
    command = [str(python), "-m", "scripts.checks.engine_trial", engine.name]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return engine.name, release, "no", "", "", f"did not end within {_PATIENCE_SECONDS} seconds"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return engine.name, release, "no", "", "", (done.stderr.strip().splitlines() or ["no output"])[-1]
    trial = json.loads(lines[-1])
    then = trial["then"] if trial.get("killed") else _NOT_KILLED
    names = {True: "yes", False: "no"}
    return engine.name, release, names[trial["is_equal"]], str(trial["kept"]), names[trial["is_equal_then"]], then


if __name__ == "__main__":
    main()
