"""README's two commands on every interpreter of this machine, with the newest and with the oldest dependencies.

    python -m scripts.checks.interpreters --work /var/tmp/interpreters

Each try is a fresh clone of what is committed, in which `make demo` and `make test` install an environment of its own;
it is deleted afterwards. The dependencies are

- newest: what pip chooses today, with torch_xla and the torch that belongs to it, as a reader of README gets them;
- torch:  the same with the newest torch, and so without torch_xla;
- oldest: the oldest releases within pyproject.toml's bounds that have a wheel for the interpreter, without torch_xla.

Wheels are kept in the working folder, so that the next try downloads only what it lacks. A try takes about 9 GB.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.checks.pythons import Version, find_pythons

ROOT: Final = Path(__file__).parents[2]
EXTRAS: Final = {"newest": "xla,dev", "torch": "dev", "oldest": "dev"}
LIBRARIES: Final = ("numpy", "torch", "torch_xla", "pillow", "lmdb")
HEADER: Final = ("Python", "dependencies", *LIBRARIES, "make demo", "make test", "minutes")

_SUMMARY: Final = re.compile(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error)[^=\n]*?) in [\d.]+s", re.MULTILINE)
_VERSIONS: Final = """
import importlib.metadata as metadata, sys
for name in sys.argv[1:]:
    try:
        print(metadata.version(name))
    except metadata.PackageNotFoundError:
        print("-")
"""


@dataclass(frozen=True)
class Try:
    """One interpreter with one choice of dependencies."""

    version: Version
    python: Path
    dependencies: str

    @property
    def name(self) -> str:
        """A name for its folder and its log."""
        return f"{self.version[0]}.{self.version[1]}-{self.dependencies}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    tries = [
        Try(version, python, dependencies)
        for version, python in find_pythons().items()
        if not options.pythons or f"{version[0]}.{version[1]}" in options.pythons
        for dependencies in options.dependencies
    ]
    if not tries:
        sys.exit("none of the interpreters asked for is found")
    work = Path(options.work or tempfile.mkdtemp(prefix="interpreters-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows, failed = [], False
    for each in tries:
        print(f"{each.name}: {each.python}, log in {work / each.name}.log", flush=True)
        row = _run(each, work, options.tests, demo=not options.no_demo)
        failed |= any("failed" in cell or "error" in cell for cell in row)
        rows.append(row)
        if not options.keep:
            shutil.rmtree(work / each.name)
        print(_table(rows), flush=True)  # each time: all of it takes hours
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", metavar="3.X", help="these versions alone")
    parser.add_argument("--dependencies", nargs="+", choices=EXTRAS, default=list(EXTRAS))
    parser.add_argument("--tests", nargs="+", default=[], help="these files or folders of tests alone")
    parser.add_argument("--no-demo", action="store_true", help="leave `make demo` out")
    parser.add_argument("--work", help="folder for clones, logs and wheels (a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the clones with their environments")
    return parser


def _run(each: Try, work: Path, tests: Sequence[str], *, demo: bool) -> list[str]:
    """Clone, install, run both commands, and return a row of the table."""
    began = time.monotonic()
    clone, log = work / each.name, work / f"{each.name}.log"
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    environment = _environment(work)
    cells = {"demo": "not run", "test": "not installed"}
    with log.open("w") as output:
        if each.dependencies == "oldest":
            environment["PIP_CONSTRAINT"] = str(_oldest(each, work, environment))

        def make(target: str) -> bool:
            words = ["make", target, f"PYTHON={each.python}", f"EXTRAS={EXTRAS[each.dependencies]}"]
            words.append(f"TESTS={' '.join(tests)}")
            done = subprocess.run(words, cwd=clone, env=environment, stdout=output, stderr=output, check=False)
            output.flush()
            return done.returncode == 0

        if make("install"):
            if demo:
                cells["demo"] = "passed" if make("demo") else "failed"
            passed = make("test")
            found = _SUMMARY.findall(log.read_text(errors="replace"))
            cells["test"] = (found[-1] if found else "no summary") + ("" if passed else " (failed)")
        else:
            cells = dict.fromkeys(cells, "install failed")
    minutes = f"{(time.monotonic() - began) / 60:.0f}"
    version = f"{each.version[0]}.{each.version[1]}"
    return [version, each.dependencies, *_versions(clone), cells["demo"], cells["test"], minutes]


def _environment(work: Path) -> dict[str, str]:
    """Return an environment in which pip keeps its wheels, and nothing of this one's own environment is seen."""
    hidden = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PIP_NO_CACHE_DIR", "MAKEFLAGS", "MAKELEVEL")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PIP_CACHE_DIR": str(work / "wheels")}


def _oldest(each: Try, work: Path, environment: Mapping[str, str]) -> Path:
    """Write the oldest releases of what pyproject.toml names as pip's constraints, as uv resolves them."""
    tool = work / "uv"
    if not (tool / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", tool], check=True)
        subprocess.run([tool / "bin" / "pip", "install", "--quiet", "uv"], env=environment, check=True)
    command: list[str | Path] = [
        tool / "bin" / "uv",
        "pip",
        "compile",
        "--quiet",
        "--python",
        each.python,
        "--no-annotate",
        "--no-header",
    ]
    command += ["--resolution", "lowest-direct", "--only-binary", ":all:", ROOT / "pyproject.toml"]
    command += [word for extra in EXTRAS["oldest"].split(",") for word in ("--extra", extra)]
    target = work / f"{each.name}.txt"
    # What nobody names is resolved to its newest release, which may ask for a newer numpy: numpy is settled first.
    first = work / "first.txt"
    bounds = re.search(r'"numpy>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    if bounds is None:
        sys.exit("pyproject.toml names no oldest numpy")
    first.write_text(f"numpy=={bounds[1]}.*\n")
    done = subprocess.run([*command, "--constraint", first, "--output-file", target], capture_output=True, check=False)
    if done.returncode:  # it has no wheel for this interpreter
        subprocess.run([*command, "--output-file", target], check=True)
    return target


def _versions(clone: Path) -> list[str]:
    python = clone / ".venv" / "bin" / "python"
    if not python.exists():
        return ["-"] * len(LIBRARIES)
    done = subprocess.run([python, "-c", _VERSIONS, *LIBRARIES], capture_output=True, text=True, check=True)
    return done.stdout.split()


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [HEADER, ["---"] * len(HEADER), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
