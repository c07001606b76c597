"""A copy of the package without a wing: commands of the core work, and what is missing is said in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from patience import PATIENCE

from scripts.checks.wings import WINGS, copy_without
from tpucache.cli import make_parser
from tpucache.wings import COMMANDS, FUNCTIONS, PAGES

pytestmark = pytest.mark.slow

#: Runs commands; prints their statuses, and what each writes to standard output and standard error.
PROGRAM = """
import contextlib, io, json, sys
from tpucache.cli import main
found = []
for words in json.loads(sys.argv[1]):
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            status = main(words)
        except SystemExit as end:
            status = int(end.code or 0)
    found.append((status, printed.getvalue(), said.getvalue()))
print(json.dumps(found))
"""


class Done(NamedTuple):
    """A command and how it ended."""

    words: list[str]
    status: int
    printed: str
    said: str


Run = Callable[[Iterable[Sequence[object]]], list[Done]]

#: The commands that need a wing, with their words after a cache: what they show of the missing wing, and their status.
MISSING = {
    "training": [
        (("train", "{cache}", "--run", "run"), 2),
        (("predict", "run", "{cache}", "-o", "out.csv"), 2),
        (("bench", "{cache}", "--upload"), 1),
        (("report", "{run}", "-o", "page.html"), 1),
    ],
    "insight": [
        (("compare", "{cache}", "{cache}"), 2),
        (("suspects", "run"), 2),
        (("report", "{cache}", "--findings", "-o", "page.html"), 1),
        (("relabel", "{cache}", "--make-folds", "2"), 1),
        (("push", "{cache}", "pushed", "--hashes"), 1),
    ],
}


@pytest.fixture(scope="module", params=WINGS)
def wing(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def run(wing: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The function `run(commands)`: what they do, one after the other, in a process that has no such wing."""
    environment = copy_without(wing, tmp_path_factory.mktemp("copy"))
    folder = tmp_path_factory.mktemp("work")

    def run(commands: Iterable[Sequence[object]]) -> list[Done]:
        words = [[*map(str, each)] for each in commands]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(words)], cwd=folder, env=environment, capture_output=True,
            text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [Done(each, *found) for each, found in zip(words, json.loads(done.stdout), strict=True)]

    return run


def test_commands_of_the_core_work_without_a_wing(run: Run, photos: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    commands = (
        ("warmup", photos, cache, "--size", "16", "--limit", "8", "--jobs", "1"),
        ("inspect", cache),
        ("verify", cache),
        ("preview", cache, "-o", tmp_path / "sheet.png"),
        ("report", cache, "-o", tmp_path / "page.html"),
        ("doctor", "--no-xla"),
        ("push", cache, tmp_path / "pushed"),
    )
    assert [done for done in run(commands) if done.status] == []


def test_what_needs_a_missing_wing_says_so_in_one_line(wing: str, run: Run, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    places = {"cache": cache, "run": tmp_path}
    wanted = [[word.format(**places) for word in words] for words, _ in MISSING[wing]]
    *found, listed = run([*wanted, ["--help"]])
    assert [done.status for done in found] == [status for _, status in MISSING[wing]], found
    for done in found:
        assert f"tpucache.{wing} is missing" in done.said.splitlines()[-1]
        assert "Traceback" not in done.said
    text = " ".join(listed.printed.split())
    for group in COMMANDS.values():
        for name, (module, said) in group.items():
            is_missing = module.startswith(f"tpucache.{wing}.")
            assert (f"{name} tpucache.{wing} is missing" if is_missing else f"{name} {said}") in text


def test_the_tables_name_what_there_is() -> None:
    (commands,) = (each for each in make_parser()._actions if each.dest == "==SUPPRESS==" and each.choices)
    assert [*commands.choices] == [name for group in COMMANDS.values() for name in group]
    for references in (PAGES, FUNCTIONS):
        for reference in references.values():
            module, _, name = reference.partition(":")
            assert callable(getattr(__import__(module, fromlist=[name]), name))
