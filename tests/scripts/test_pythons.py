"""Which interpreters the checks run on, and what .ci/run makes of a second one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import PATIENCE

from scripts.checks.pythons import find_pythons

CI = Path(__file__).parents[2] / ".ci" / "run"

#: Writes down what it was asked for, and fails where it is to fail.
MAKE = r"""#!/bin/sh
echo "$*" >> calls
case "$*" in "$FAILS"*) exit 1;; esac
"""


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def interpreter(path: Path, answer: str) -> Path:
    return write_program(path, f"#!/bin/sh\n{answer}\n")


def test_the_first_working_interpreter_of_each_supported_version_is_found(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    expected = {
        (3, 11): interpreter(second / "python3.11", "echo 3 11 True"),
        (3, 12): interpreter(first / "python3.12", "echo 3 12 True"),
    }
    interpreter(second / "python3.12", "echo 3 12 True")
    interpreter(first / "python3.10", "echo 3 10 True")
    interpreter(first / "python3.13", "echo 3 13 False")  # of an environment
    interpreter(first / "python3.14", "exit 1")  # a shim, or without venv
    interpreter(first / "python3.11-config", "echo 3 11 True")
    (first / "python3.15").write_text("")  # not executable
    assert find_pythons([first, second, tmp_path / "missing"]) == expected
    assert list(find_pythons([first, second])) == [(3, 11), (3, 12)]


@pytest.fixture
def run_ci(tmp_path: Path) -> Callable[[str, str], tuple[int, list[str]]]:
    """Run .ci/run where make and Python are stand-ins; return its status and what was asked of them."""

    def run(other: str, fails: str) -> tuple[int, list[str]]:
        write_program(tmp_path / "bin" / "make", MAKE)
        python = f'#!/bin/sh\n[ "$*" != "-m $FAILS" ] || exit 1\necho {other}\n'
        write_program(tmp_path / ".venv" / "bin" / "python", python)
        shutil.copytree(CI.parent, tmp_path / ".ci", dirs_exist_ok=True)
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [tmp_path / ".ci" / "run"], env={**os.environ, "PATH": path, "FAILS": fails}, check=False, timeout=PATIENCE
        )
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    return run


def test_ci_tests_the_core_on_a_second_interpreter(run_ci: Callable[..., tuple[int, list[str]]]) -> None:
    status, calls = run_ci("/usr/bin/python3.19", "nothing")
    assert status == 0
    assert calls[0] == "install install-docs"
    assert {"lint", "docs"} < set(calls[1:4])
    (install,) = (call for call in calls[1:4] if call not in ("lint", "docs"))
    first, second = calls[4:]
    assert first == "test"
    assert install == "install-core PYTHON=/usr/bin/python3.19 VENV=.venv-python3.19"
    assert second == install.replace("install", "test", 1)


def test_ci_runs_on_one_interpreter_where_there_is_no_other(run_ci: Callable[..., tuple[int, list[str]]]) -> None:
    assert run_ci("", "nothing") == (0, ["install install-docs", "lint", "docs", "test"])


@pytest.mark.parametrize("fails", ["install install", "lint", "docs", "install-core", "test", "test-core"])
def test_ci_fails_where_any_part_of_it_fails(run_ci: Callable[..., tuple[int, list[str]]], fails: str) -> None:
    status, calls = run_ci("/usr/bin/python3.19", fails)
    assert status != 0
    assert any(call.startswith(fails) for call in calls)
    if not fails.startswith("test"):
        assert "test" not in calls


@pytest.mark.parametrize("fails", ["scripts.checks install", "scripts.checks page_blocks"])
def test_ci_fails_where_a_check_fails(run_ci: Callable[..., tuple[int, list[str]]], fails: str) -> None:
    status, calls = run_ci("", fails)
    assert status != 0
    assert "test" not in calls
