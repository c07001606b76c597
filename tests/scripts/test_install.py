"""How `make` installs: by uv or pip, with the build of torch that fits the machine, whatever can be reached."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from patience import PATIENCE

ROOT = Path(__file__).parents[2]

#: Writes down its own name and what it was asked for; fails where its name and words hold a line of $FAILS.
STAND_IN = r"""#!/bin/sh
call="${0##*/} $*"
echo "$call" >> "$CALLS"
[ -n "$UV_DEFAULT_INDEX" ] && echo "index $UV_DEFAULT_INDEX" >> "$CALLS"
case "$call" in *"config get"*) echo "$INDEX";; esac
IFS='
'
for words in $FAILS; do case "$call" in *"$words"*) exit 1;; esac; done
exit 0
"""


class Installed(NamedTuple):
    status: int
    calls: list[str]
    said: str


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Installed]:
    """Run the installer where every program that it calls is a stand-in."""

    def run(*words: str, on_path: tuple[str, ...] = (), fails: tuple[str, ...] = (), index: str = "") -> Installed:
        programs, calls = tmp_path / "bin", tmp_path / "calls"
        for path in [tmp_path / "venv/bin/python", *(programs / name for name in on_path)]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(STAND_IN)
            path.chmod(0o755)
        environment = {
            "PATH": str(programs),  # whatever this machine has installed
            "CALLS": str(calls),
            "FAILS": "\n".join(fails),
            "INDEX": index,
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "scripts.install", tmp_path / "venv", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        return Installed(done.returncode, calls.read_text().splitlines(), done.stderr)

    return run


def by_uv(done: Installed) -> list[str]:
    return [call.partition("--editable ")[2] for call in done.calls if call.startswith("uv pip install")]


def by_pip(done: Installed) -> list[str]:
    return [call.removeprefix("python -m pip install ") for call in done.calls if call.startswith("python -m pip inst")]


pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no second build of torch")
def test_without_a_gpu_uv_takes_the_build_of_torch_for_cpus(install: Callable[..., Installed]) -> None:
    done = install("demo", on_path=("uv", "nvidia-smi"), fails=("nvidia-smi",))
    assert (done.status, by_uv(done), by_pip(done)) == (0, [".[demo] --torch-backend=cpu"], [])
    assert "the build of torch is cpu (no NVIDIA GPU works here)" in done.said


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no second build of torch")
def test_where_a_gpu_answers_uv_takes_the_build_that_its_driver_runs(install: Callable[..., Installed]) -> None:
    done = install("xla,dev", on_path=("uv", "nvidia-smi"))
    assert (done.status, by_uv(done)) == (0, [".[xla,dev] --torch-backend=auto"])
    assert "the build of torch is cuda (an NVIDIA GPU works here)" in done.said


@pytest.mark.parametrize(("torch", "option"), [("cpu", " --torch-backend=cpu"), ("any", "")])
def test_the_build_that_was_asked_for_is_taken_whatever_the_machine_has(
    install: Callable[..., Installed], torch: str, option: str
) -> None:
    done = install("demo", "--torch", torch, on_path=("uv", "nvidia-smi"))
    assert (done.status, by_uv(done)) == (0, [f".[demo]{option}"])


def test_where_pytorchs_index_does_not_answer_the_package_index_does(install: Callable[..., Installed]) -> None:
    done = install("demo", "--torch", "cpu", on_path=("uv",), fails=("--torch-backend",))
    assert (done.status, by_uv(done), by_pip(done)) == (0, [".[demo] --torch-backend=cpu", ".[demo]"], [])
    assert "PyTorch's own index has not given that build (see above): going on without it" in done.said


def test_where_uv_installs_nothing_pip_does(install: Callable[..., Installed]) -> None:
    done = install("demo", "--torch", "any", on_path=("uv",), fails=("uv pip install",))
    assert (done.status, len(by_uv(done)), by_pip(done)) == (0, 1, ["--editable .[demo]"])


def test_where_there_is_no_uv_it_is_asked_of_pip_and_without_it_pip_installs(install: Callable[..., Installed]) -> None:
    done = install("demo", fails=("--disable-pip-version-check uv",))
    assert done.status == 0
    assert by_pip(done) == ["--quiet --disable-pip-version-check uv", "--editable .[demo]"]
    assert "tpucache[demo] by pip" in done.said


def test_what_nobody_can_install_is_an_error(install: Callable[..., Installed]) -> None:
    done = install("demo", on_path=("uv",), fails=("install",))
    assert done.status == 1
    assert done.said.splitlines()[-1] == "install: pip has not installed it (see above)"


def test_uv_asks_the_index_that_pip_is_configured_for(install: Callable[..., Installed]) -> None:
    done = install("demo", "--torch", "any", on_path=("uv",), index="https://mirror.invalid/simple")
    assert "index https://mirror.invalid/simple" in done.calls
    again = install("demo", "--torch", "any", on_path=("uv",)).calls[len(done.calls) :]
    assert [call for call in again if call.startswith("index ")] == []
