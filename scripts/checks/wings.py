"""The core without a wing: its own tests, on a copy of the package without training/, and on one without insight/.

A test that names a wing, one of its commands or what it does for the core is left out, and counted. It prints a table,
and ends in status 1 where a test fails.

    python -m scripts.checks wings [--wing training] [--jobs 2] [TESTS …]
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from scripts.commands import ROOT, say
from tpucache.plugins import COMMANDS

#: The wings, and what names what they do for others: public names of `tpucache`, options, and fixtures of the tests.
WINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "training": ("report_run", "--upload", "short_runs", "short_replay", "xla_forks"),
    "insight": ("report_findings", "--findings", "--make-folds", "--hashes", "hashes=True"),
}
#: The tests of the core: all others train, compare, or need more than the package.
TESTS: Final = ("store", "loading", "ondevice", "warmup", "report", "publish", "adopt", "jax", "cli")

#: Takes out what finds the modules of an installation that can be edited, also those that the copy lacks.
_SITE: Final = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
"""


def copy_without(wing: str, folder: Path) -> dict[str, str]:
    """Copy the package without a wing into a folder; return the environment in which Python imports that copy.

    The wing's folder stays with nothing in it but a __pycache__, as after `git rm`.
    """
    hidden = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tpucache", folder / "tpucache", ignore=hidden)
    shutil.rmtree(folder / "tpucache" / wing)
    (folder / "tpucache" / wing / "__pycache__").mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(_SITE)
    return {**os.environ, "PYTHONPATH": str(folder)}


def main() -> int:
    """Run the core's tests without each wing, and print how they ended."""
    parser = argparse.ArgumentParser(prog=Path(sys.argv[0]).name, description=__doc__.partition("\n")[0])
    parser.add_argument(
        "tests", nargs="*", metavar="TESTS", help="folders and files in tests/; the core's if not given"
    )
    parser.add_argument("--wing", choices=WINGS, help="leave this one out alone")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes that test (2)")
    arguments = parser.parse_args()
    found = {}
    for wing in [arguments.wing] if arguments.wing else WINGS:
        say(f"testing without {wing}")
        with tempfile.TemporaryDirectory(prefix="tpucache-wings-") as folder:
            found[wing] = run_without(wing, Path(folder), arguments.tests or TESTS, arguments.jobs)
    print("| without | tests left out | how the others ended |\n|---|---:|---|")
    for wing, (left_out, _, text) in found.items():
        print(f"| {wing} | {left_out:,} | {text} |")
    return int(any(status for _, status, _ in found.values()))


def run_without(wing: str, folder: Path, tests: Sequence[str], jobs: int) -> tuple[int, int, str]:
    """Run tests on a copy without a wing; return how many are left out, pytest's status, and its last line."""
    environment = copy_without(wing, folder)
    for name in ("tests", "scripts", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    left_out = [
        word
        for path in sorted((folder / "tests").rglob("test_*.py"))
        for word in words_about(wing, path, path.relative_to(folder))
    ]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", str(jobs), "--dist", "worksteal"]
    places = [f"tests/{name}" for name in tests]
    done = subprocess.run(
        [*command, *left_out, *places], cwd=folder, env=environment, check=False, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, file=sys.stderr)
    return len(left_out), done.returncode, (done.stdout.splitlines() or ["nothing"])[-1].strip("= ")


def words_about(wing: str, path: Path, name: Path) -> list[str]:
    """Return the options of pytest that leave out a file of tests, or those of them that are about a wing."""
    text = path.read_text()
    lines = text.splitlines()
    commands = [each for group in COMMANDS.values() for each, (home, _) in group.items() if f".{wing}." in home]
    quoted = [*(f'"{each}"' for each in commands), *(f'"{each} ' for each in commands)]
    about = re.compile("|".join([rf"tpucache\.{wing}\b", *map(re.escape, (*quoted, *WINGS[wing]))]))
    tree = ast.parse(text)
    tests = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]
    others = [each for each in tree.body if each not in tests]
    if any(about.search(_whole(lines, each)) for each in others):
        return [f"--ignore={name}"]
    named = [each.name for each in tests if about.search(_whole(lines, each))]
    return [f"--deselect={name}::{each}" for each in named]


def _whole(lines: Sequence[str], node: ast.stmt) -> str:
    """Return the lines of a statement, with the decorators of a function."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    return "\n".join(lines[first - 1 : node.end_lineno])


if __name__ == "__main__":
    sys.exit(main())
