"""`resuming.py` passes in a process of its own: Lightning and accelerate import torch_xla where it is installed."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from thorough import thorough

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def outcomes(environment, xla_forks, tmp_path_factory):
    """What became of each test of `resuming.py`, by the library in its name: one process runs them all."""
    folder = tmp_path_factory.mktemp("resuming")
    own = ["-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={folder / 'own'}", "-rA", "--junitxml"]
    done = xla_forks.run([*own, str(folder / "found.xml"), str(HERE / "resuming.py")], environment)
    cases = ElementTree.parse(folder / "found.xml").iter("testcase")
    return {case.get("name").split("_")[1]: [child.tag for child in case] for case in cases}, done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("library", [*thorough("lightning"), "accelerate"])
def test_a_run_resumes_inside_an_epoch(library, needs, outcomes):
    needs(library)
    found, said = outcomes
    assert found[library] == [], said  # neither failed nor skipped
