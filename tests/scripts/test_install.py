"""How `make` installs: by uv or pip, with the build of torch that fits the machine, whatever can be reached."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., tuple[int, list[str], str]]:
    """Run the installer where every program that it calls is a stand-in."""

    def run(*words: str, on_path: tuple[str, ...], fails: str = "", index: str = "") -> tuple[int, list[str], str]:
        programs, calls = tmp_path / "bin", tmp_path / "calls"
        for path in [tmp_path / "venv/bin/python", *(programs / name for name in on_path)]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(STAND_IN)
            path.chmod(0o755)
        environment = {
            "PATH": str(programs),  # whatever this machine has installed
            "CALLS": str(calls),
            "FAILS": fails,
            "INDEX": index,
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "scripts.install", tmp_path / "venv", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        return done.returncode, calls.read_text().splitlines(), done.stderr

    return run


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="this system has no second build of torch")
GPU = ("uv", "nvidia-smi")
CPU, PLAIN = ".[demo] --torch-backend=cpu", ".[demo]"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("words", "on_path", "fails", "status", "by_uv", "by_pip", "said"),
    [
        pytest.param("demo", GPU, "nvidia-smi", 0, [CPU], [], "is cpu (no NVIDIA GPU works here)", marks=LINUX),
        pytest.param(
            "xla,dev", GPU, "", 0, [".[xla,dev] --torch-backend=auto"], [], "is cuda (an NVIDIA GPU works", marks=LINUX
        ),
        ("demo --torch cpu", GPU, "", 0, [CPU], [], ""),
        ("demo --torch any", GPU, "", 0, [PLAIN], [], ""),
        (
            "demo --torch cpu", ("uv",), "--torch-backend", 0, [CPU, PLAIN], [],
            "PyTorch's own index has not given that build (see above): going on without it",
        ),
        ("demo --torch any", ("uv",), "uv pip install", 0, [PLAIN], ["--editable .[demo]"], ""),
        (
            "demo", (), "--disable-pip-version-check uv", 0, [],
            ["--quiet --disable-pip-version-check uv", "--editable .[demo]"], "tpucache[demo] by pip",
        ),
        (
            "demo --torch any", ("uv",), "install", 1, [PLAIN], ["--editable .[demo]"],
            "install: pip has not installed it (see above)\n",
        ),
    ],
)  # fmt: skip
def test_uv_installs_the_build_of_torch_that_fits_or_else_what_can_be_reached(
    install, words, on_path, fails, status, by_uv, by_pip, said
) -> None:
    found, calls, errors = install(*words.split(), on_path=on_path, fails=fails)
    assert found == status
    assert [call.partition("--editable ")[2] for call in calls if call.startswith("uv pip install")] == by_uv
    pip = "python -m pip install "
    assert [call.removeprefix(pip) for call in calls if call.startswith(pip)] == by_pip
    assert said in errors


def test_uv_asks_the_index_that_pip_is_configured_for(install) -> None:
    _, calls, _ = install("demo", "--torch", "any", on_path=("uv",), index="https://mirror.invalid/simple")
    assert "index https://mirror.invalid/simple" in calls
    _, again, _ = install("demo", "--torch", "any", on_path=("uv",))
    assert [call for call in again[len(calls) :] if call.startswith("index ")] == []
