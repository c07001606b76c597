"""What a contributor's tools run is what CI runs, on the Pythons that are promised."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_hooks_before_a_commit_are_the_tools_of_make_lint() -> None:
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    linters = [" ".join(line.split()).replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe.splitlines()]
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"].removesuffix(" --force-exclude") for hook in repository["hooks"]] == linters


def test_the_workflow_runs_the_script_of_ci_on_each_python_that_is_promised() -> None:
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert jobs["ci"]["strategy"]["matrix"]["python"] == promised
    assert jobs["ci"]["steps"][-1] == {"run": ".ci/run"}
    assert f'requires-python = ">={promised[0]}"' in PROJECT


@pytest.mark.parametrize("name", ["scripts.bench loader", "scripts.checks.fuzz", "scripts.release"])
def test_commands_that_contributors_are_given_exist(name: str) -> None:
    path = ROOT.joinpath(*name.replace(" ", ".").split("."))
    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize(
    "page", [".github/CONTRIBUTING.md", "docs/stability.md", *map(str, ROOT.glob("docs/decisions/*"))]
)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
