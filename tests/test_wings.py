"""A copy of the package without a wing: commands of the core work, and what is missing is said in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from once import once
from patience import PATIENCE
from thorough import thorough

import tpucache
from tpucache.plugins import COMMANDS, FUNCTIONS, load

pytestmark = pytest.mark.slow

WINGS = ("training", "insight")

#: Takes out what finds the modules of an installation that can be edited, also those that the copy lacks.
SITE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
"""


def copy_without(wing: str, folder: Path) -> dict[str, str]:
    package = Path(tpucache.__file__).parent
    shutil.copytree(package, folder / "tpucache", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(folder / "tpucache" / wing)
    (folder / "tpucache" / wing / "__pycache__").mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(SITE)
    return {**os.environ, "PYTHONPATH": str(folder)}


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


#: Commands of the core, one after the other.
OF_THE_CORE = (
    ("warmup", "{photos}", "made", "--size", "16", "--limit", "8", "--jobs", "1"),
    ("inspect", "made"),
    ("verify", "made"),
    ("preview", "made", "-o", "sheet.png"),
    ("report", "made", "-o", "page.html"),
    ("doctor", "--no-xla"),
    ("push", "made", "pushed"),
)
#: The commands that need a wing, with their words after a cache: what they show of the missing wing, and their status.
MISSING = {
    "training": [
        (("train", "{cache}", "--run", "run"), 2),
        (("predict", "run", "{cache}", "-o", "out.csv"), 2),
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


@pytest.fixture(scope="module", params=["training", *thorough(*{*WINGS} - {"training"})])
def wing(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def done(
    wing: str, photos: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Done], list[Done]]:
    """What commands of the core do, and those that need the wing, in one process that has no such wing."""

    def run(folder: Path) -> None:
        (folder / "run.json").write_text("{}")
        needing = [[word.format(cache=cache, run=folder) for word in words] for words, _ in MISSING[wing]]
        words = [*([word.format(photos=photos) for word in each] for each in OF_THE_CORE), *needing, ["--help"]]
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(words)], cwd=folder,
            env=copy_without(wing, tmp_path_factory.mktemp("copy")), capture_output=True, text=True, check=False,
            timeout=PATIENCE,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        results = [[each, *of] for each, of in zip(words, json.loads(ended.stdout), strict=True)]
        (folder / "results.json").write_text(json.dumps(results))

    folder = once(tmp_path_factory, f"without-{wing}", run)
    found = [Done(*each) for each in json.loads((folder / "results.json").read_text())]
    return found[: len(OF_THE_CORE)], found[len(OF_THE_CORE) :]


def test_commands_of_the_core_work_without_a_wing(done: tuple[list[Done], list[Done]]) -> None:
    assert [each for each in done[0] if each.status] == []


def test_what_needs_a_missing_wing_says_so_in_one_line(wing: str, done: tuple[list[Done], list[Done]]) -> None:
    *found, listed = done[1]
    assert [each.status for each in found] == [status for _, status in MISSING[wing]], found
    for each in found:
        assert f"tpucache.{wing} is missing" in each.said.splitlines()[-1]
        assert "Traceback" not in each.said
    text = " ".join(listed.printed.split())
    for module, texts in (pair for modules in COMMANDS.values() for pair in modules.items()):
        is_missing = module.startswith(f"tpucache.{wing}.")
        for name, said in texts.items():
            assert (f"{name} tpucache.{wing} is missing" if is_missing else f"{name} {said}") in text


def test_the_tables_name_what_there_is() -> None:
    assert all(callable(load(reference)) for reference in FUNCTIONS.values())
