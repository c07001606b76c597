"""Where CI is set, no test is skipped for want of a package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from thorough import thorough

TESTS = Path(__file__).parent
SKIPPED = """
import pytest
def test_a(): {skip}
"""
WHOLE_FILE = "import pytest\nmissing = pytest.importorskip('no_such_library')\ndef test_a(): pass\n"
MISSING = SKIPPED.format(skip="pytest.importorskip('no_such_library')")
MACHINE = SKIPPED.format(skip="pytest.skip('no browser is found')")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "in_ci", "status"),
    [
        pytest.param(MISSING, True, 1, id="a test"),
        *thorough(
            pytest.param(WHOLE_FILE, True, 2, id="a file"),
            pytest.param(MACHINE, True, 0, id="what the machine lacks"),
            pytest.param(MISSING, False, 0, id="not in CI"),
        ),
    ],
)
def test_a_skip_for_a_missing_package_fails_in_ci_alone(program, in_ci, status, tmp_path) -> None:
    (tmp_path / "test_a.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "CI": "1" * in_ci}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", tmp_path / "test_a.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == status, done.stdout
    if status:
        assert "add it to the extra `dev` of pyproject.toml" in done.stdout
    elif in_ci:
        assert "SKIPPED [1] test_a.py" in done.stdout
