"""Installs this checkout and what it needs into a virtual environment, as `make` asks, by the standard library alone.

    python3 -m scripts.install .venv demo
    python3 -m scripts.install .venv xla,dev --torch cuda

uv installs where it is there or can be had, and pip elsewhere. torch is the build for CPUs, which needs none of CUDA's
libraries, unless an NVIDIA GPU works here. uv knows the index that has this build; where that index cannot be reached,
torch is what the package index has, which on Linux is the build with CUDA.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from scripts.commands import make_parser

OLDEST: Final = (3, 11)


def say(line: str) -> None:
    """Print a line about the installation."""
    print(f"install: {line}", file=sys.stderr, flush=True)


def is_done(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> bool:
    """Run a program, whose output is seen, and return whether it succeeded."""
    return subprocess.run(command, check=False, env=environment).returncode == 0


def has_gpu() -> bool:
    """Return whether an NVIDIA GPU answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], check=False, capture_output=True).returncode == 0


def has_tpu() -> bool:
    """Return whether this machine has the devices of a TPU."""
    return any(any(Path("/dev").glob(pattern)) for pattern in ("accel[0-9]*", "vfio/[0-9]*"))


def make_environment(venv: Path) -> Path:
    """Make a virtual environment with pip unless it is there, and return its interpreter."""
    python = venv / "bin" / "python"
    if python.exists():
        return python
    uv = shutil.which("uv")
    if uv and is_done([uv, "venv", "--quiet", "--seed", "--python", sys.executable, venv]):
        return python
    if not is_done([sys.executable, "-m", "venv", venv]):
        sys.exit(f"install: {sys.executable} makes no environments: install its venv (Debian: python3-venv), or uv")
    return python


def find_uv(python: Path) -> Path | None:
    """Return uv: the one on PATH, or the environment's own, which pip installs; None where pip finds none."""
    if found := shutil.which("uv"):
        return Path(found)
    own = python.with_name("uv")
    quiet: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"]
    return own if own.exists() or is_done(quiet) else None


def index_of_pip(python: Path) -> dict[str, str]:
    """Return the variables that make uv ask the index that pip is configured for."""
    if any(name in os.environ for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")):
        return {}
    asked: list[str | Path] = [python, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()
    index = os.environ.get("PIP_INDEX_URL") or configured
    return {"UV_DEFAULT_INDEX": index} if index else {}


def choose_torch(asked: str) -> tuple[str, str]:
    """Return the build of torch, cpu or cuda, and the reason."""
    if sys.platform != "linux":
        return "any", "this platform has one build"
    if asked != "auto":
        return asked, f"TORCH={asked}"
    return ("cuda", "an NVIDIA GPU works here") if has_gpu() else ("cpu", "no NVIDIA GPU works here")


def ways(uv: Path | None, python: Path, what: str, build: str) -> Iterator[tuple[list[str | Path], str]]:
    """Yield the commands that install, best first, each with what a failure of it means."""
    if uv:
        by_uv: list[str | Path] = [uv, "pip", "install", "--python", python, "--editable", what]
        if build in ("cpu", "cuda"):
            backend = "cpu" if build == "cpu" else "auto"
            yield [*by_uv, f"--torch-backend={backend}"], "PyTorch's own index has not given that build"
        yield by_uv, "uv has not installed it"
    yield [python, "-m", "pip", "install", "--editable", what], "pip has not installed it"


def install(venv: Path, extras: Sequence[str], torch: str) -> None:
    """Install the checkout in the current folder, with some extras."""
    python = make_environment(venv)
    uv = find_uv(python)
    build, reason = choose_torch(torch)
    what = f".[{','.join(extras)}]"
    say(f"tpucache[{','.join(extras)}] by {'uv' if uv else 'pip'}; the build of torch is {build} ({reason})")
    environment = {**os.environ, **index_of_pip(python)}
    failure = ""
    for command, meaning in ways(uv, python, what, build):
        if failure:
            say(f"{failure} (see above): going on without it")
        if is_done(command, environment):
            return
        failure = meaning
    sys.exit(f"install: {failure} (see above)")


def main() -> None:
    """Install as the command line asks."""
    parser = make_parser(__doc__)
    parser.add_argument("venv", type=Path, help="the folder of the virtual environment")
    parser.add_argument("extras", help="extras of pyproject.toml, separated by commas")
    parser.add_argument("--torch", choices=("auto", "cpu", "cuda", "any"), default="auto", help="the build of torch")
    options = parser.parse_args()
    if sys.version_info < OLDEST:
        sys.exit(f"install: tpucache needs Python {OLDEST[0]}.{OLDEST[1]} or newer")
    extras = options.extras.split(",")
    if "demo" in extras and "xla" not in extras and has_tpu():
        say("a TPU is here: torch_xla is installed, too")
        extras.append("xla")
    install(options.venv, extras, options.torch)


if __name__ == "__main__":
    main()
