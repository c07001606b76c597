"""What a contributor's tools run is what CI runs, on the Pythons that are promised."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from patience import PATIENCE

from scripts.dispatch import find_commands

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def last_command(target: str) -> str:
    words = ["make", "--dry-run", "--always-make", "--no-print-directory", target]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return done.stdout.splitlines()[-1].strip()


def test_the_hooks_before_a_commit_are_the_tools_of_make_lint() -> None:
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    linters = [" ".join(line.split()).replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe.splitlines()]
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"].removesuffix(" --force-exclude") for hook in repository["hooks"]] == linters


def test_the_workflow_tests_everything_on_one_python_and_the_core_on_each_other_that_is_promised() -> None:
    jobs = read_yaml(".github/workflows/ci.yml")["jobs"]
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    pythons = {name: jobs[name]["strategy"]["matrix"]["python"] for name in ("ci", "core")}
    assert len(pythons["ci"]) == 1
    assert sorted(pythons["ci"] + pythons["core"]) == sorted(promised)
    assert jobs["ci"]["steps"][-1] == {"run": ".ci/run"}
    assert jobs["core"]["steps"][-1] == {"run": "make test-core"}
    assert f'requires-python = ">={promised[0]}"' in PROJECT


def test_the_workflow_runs_the_thorough_tests_every_week_and_for_each_release() -> None:
    workflow = read_yaml(".github/workflows/ci.yml")
    events = workflow[True]  # what YAML 1.1 makes of `on`
    assert events["schedule"]
    assert events["push"]["tags"] == ["v*"]
    job = workflow["jobs"]["thorough"]
    assert job["if"] == "github.event_name == 'schedule' || startsWith(github.ref, 'refs/tags/')"
    assert job["steps"][-1] == {"run": "make test-all"}


def test_make_test_leaves_out_the_thorough_tests_and_make_test_all_runs_every_test() -> None:
    every = last_command("test-all")
    assert "-m pytest" in every
    assert " -m '" not in every
    assert last_command("test") == f"{every} -m 'not thorough'"
    for target in ("test-fast", "test-core"):
        assert " -m 'not slow and not xla and not thorough'" in last_command(target)


def test_each_release_has_a_date_and_says_what_a_user_has_to_do() -> None:
    parts = re.split(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    releases = dict(zip(parts[::2], parts[1::2], strict=True))
    for heading, text in releases.items():
        assert heading == "[Unreleased]" or re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading)
        assert not text.strip() or "### What you have to do\n" in text, heading


def test_each_benchmark_and_check_is_named_by_a_page_or_run_by_ci() -> None:
    users = [*ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.*"), ROOT / "README.md", ROOT / ".ci" / "run"]
    text = "\n".join(path.read_text() for path in users)
    for package in ("bench", "checks"):
        for name in find_commands(ROOT / "scripts" / package):
            assert re.search(rf"scripts\.{package}[ .]{name}\b", text), f"no page names {package} {name}"
