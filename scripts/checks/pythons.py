"""The interpreters of this machine that tpucache supports, and README's two commands on each of them.

    python -m scripts.checks pythons                                  # the newest one of another version than its own
    python -m scripts.checks pythons --run --work /var/tmp/pythons    # make demo and make test on each

Each run is a fresh clone of what is committed, in which `make demo` and `make test` install an environment of its own;
it is deleted afterwards. The dependencies are the newest, as a reader of README gets them, or with `--oldest` the
oldest releases within pyproject.toml's bounds that have a wheel for the interpreter, without torch_xla. A run takes
about 9 GB.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from scripts.commands import make_parser

OLDEST: Final = (3, 11)
Version = tuple[int, int]

_ROOT: Final = Path(__file__).parents[2]
_NAME: Final = re.compile(r"python3\.\d+")
_ASK: Final = "import ensurepip, sys, venv; print(*sys.version_info[:2], sys.prefix == sys.base_prefix)"
#: What this process's own environment would tell the clone's.
_HIDDEN: Final = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "MAKELEVEL")


def find_pythons(folders: Iterable[Path] | None = None) -> dict[Version, Path]:
    """Return a working interpreter of each version from 3.11 on, oldest first: those on PATH, then those of pyenv."""
    found: dict[Version, Path] = {}
    for folder in _folders() if folders is None else folders:
        for path in sorted(folder.glob("python3.*")):
            version = _version(path) if _NAME.fullmatch(path.name) else None
            if version is not None and version >= OLDEST:
                found.setdefault(version, path)
    return dict(sorted(found.items()))


def _folders() -> list[Path]:
    on_path = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path(os.environ.get("HOME", "/"), ".pyenv"))
    # A shim of pyenv runs only where its version is selected; the versions themselves always do.
    return [folder for folder in on_path if folder.name != "shims"] + sorted(pyenv.glob("versions/*/bin"))


def _version(path: Path) -> Version | None:
    """Return an interpreter's version, or None where it does not run, makes no environments, or belongs to one."""
    try:
        done = subprocess.run([path, "-I", "-c", _ASK], capture_output=True, text=True, check=True, timeout=30)
        major, minor, installed = done.stdout.split()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return (int(major), int(minor)) if installed == "True" else None


def run(python: Path, work: Path, *, oldest: bool) -> bool:
    """Clone, install, and run both commands; return whether they passed."""
    clone, log = work / python.name, work / f"{python.name}.log"
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", _ROOT, clone], check=True)
    environment = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    if oldest:
        environment["PIP_CONSTRAINT"] = environment["UV_CONSTRAINT"] = str(resolve_oldest(python, work))
    extras = "dev" if oldest else "xla,dev"
    is_passed = True
    with log.open("w") as output:
        for target in ("install", "demo", "test"):
            words = ["make", target, f"PYTHON={python}", f"EXTRAS={extras}"]
            done = subprocess.run(words, cwd=clone, env=environment, stdout=output, stderr=output, check=False)
            print(f"{python}, make {target}: status {done.returncode}, log in {log}", flush=True)
            is_passed &= not done.returncode
    shutil.rmtree(clone)
    return is_passed


def resolve_oldest(python: Path, work: Path) -> Path:
    """Write the oldest releases of what pyproject.toml names as constraints, as uv resolves them."""
    target = work / f"{python.name}.txt"
    words: list[str | Path] = ["uv", "pip", "compile", "--quiet", "--python", python, "--no-annotate", "--no-header"]
    words += ["--resolution", "lowest-direct", "--only-binary", ":all:", "--extra", "dev", _ROOT / "pyproject.toml"]
    subprocess.run([*words, "--output-file", target], check=True)
    return target


def main() -> int:
    """Print the newest interpreter of another version, or run both commands on each."""
    parser = make_parser(__doc__)
    parser.add_argument("--run", action="store_true", help="run `make demo` and `make test` on each")
    parser.add_argument("--oldest", action="store_true", help="with the oldest dependencies (needs uv)")
    parser.add_argument("--work", type=Path, help="folder for clones and logs (a temporary one)")
    options = parser.parse_args()
    pythons = find_pythons()
    if not options.run:
        print(*[path for version, path in pythons.items() if version != sys.version_info[:2]][-1:])
        return 0
    work = (options.work or Path(tempfile.mkdtemp(prefix="pythons-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    passed = [run(python, work, oldest=options.oldest) for python in pythons.values()]
    return int(not all(passed))
