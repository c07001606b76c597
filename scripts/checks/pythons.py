"""The interpreters of this machine that tpucache supports.

`python -m scripts.checks.pythons` prints the newest one of another version than its own, or an empty line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

OLDEST: Final = (3, 11)
Version = tuple[int, int]

_NAME: Final = re.compile(r"python3\.\d+")
_ASK: Final = "import ensurepip, sys, venv; print(*sys.version_info[:2], sys.prefix == sys.base_prefix)"


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


if __name__ == "__main__":
    others = [path for version, path in find_pythons().items() if version != sys.version_info[:2]]
    print(*others[-1:])
