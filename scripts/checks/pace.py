"""The suite on slow, busy and unusual machines: no test's verdict may depend on them.

    python -m scripts.checks pace
    python -m scripts.checks pace 3.11:one-core 3.12:shuffled+jobs-1 --seed 7 --tests tests/store

A row is a Python and what it runs under:

- one-core: one core of the machine;
- busy: two other programs compute meanwhile;
- jobs-1, jobs-8: one or eight processes run tests at once, where make test has four;
- shuffled: the files of tests in a random order, whose seed is printed;
- user: an ordinary user below a path with a space, without a home folder, with LC_ALL=C, umask 077, another time zone
  and a temporary folder with a space in its name.

The rows without arguments cover all of them in about 45 minutes of two cores. Each is a fresh clone of what is
committed, with an environment of its own, which is removed when no other row needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from scripts.checks.pythons import find_pythons
from scripts.commands import ROOT, CommandError, run_logged, say

CONDITIONS: Final = ("plain", "one-core", "busy", "jobs-1", "jobs-8", "shuffled", "user")
ROWS: Final = ("3.11:one-core+jobs-1", "3.12:busy+shuffled", "3.13:user+jobs-8")
HEADER: Final = ("Python", "conditions", "passed", "failed", "skipped", "seconds")
#: Seconds after which a row hangs, however slow its conditions are.
LIMIT: Final = 5400

_HIDDEN: Final = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "MAKELEVEL", "CI")
# Below a folder that only its owner may enter, such as /root, nobody else can run an interpreter: in a mount namespace
# of its own, the program finds nothing there but the interpreter.
_SHOW: Final = """
set -e
umask 022
aside=$(mktemp -d)
mount --bind "$1" "$aside"
mount -t tmpfs -o mode=755 tmpfs "$2"
mkdir -p "$1"
mount --move "$aside" "$1"
shift 2
umask 077
exec "$@"
"""


@dataclass(frozen=True)
class Row:
    """A Python, as 3.12, and the conditions that it runs under."""

    python: str
    conditions: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Row:
        """Read `3.12:busy+shuffled`. Raises ArgumentTypeError."""
        python, _, conditions = text.partition(":")
        found = tuple(conditions.split("+")) if conditions else ("plain",)
        if unknown := set(found) - set(CONDITIONS):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(CONDITIONS)}")
        return cls(python, found)

    @property
    def place(self) -> str:
        """The name of the folder whose clone it uses."""
        return f"{self.python} of a user" if "user" in self.conditions else self.python

    @property
    def jobs(self) -> int:
        """How many processes run tests."""
        return 1 if "jobs-1" in self.conditions else 8 if "jobs-8" in self.conditions else 4


@dataclass(frozen=True)
class Result:
    """What became of a row."""

    passed: int
    failed: tuple[str, ...]
    skipped: int
    seconds: float


def main() -> int:
    """Run the rows, and print the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Row.parse, metavar="ROW", help=f"3.X:CONDITION+… ({' '.join(ROWS)})")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the random order (another one)")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="these files or folders alone")
    parser.add_argument("--work", type=Path, help="where clones and logs are made (a temporary folder)")
    parser.add_argument("--keep", action="store_true", help="keep the clones with their environments")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows = options.rows or [Row.parse(text) for text in ROWS]
    pythons = {".".join(map(str, version)): path for version, path in find_pythons().items()}
    if absent := {row.python for row in rows} - set(pythons):
        parser.error(f"Python {', '.join(sorted(absent))} is not found: there are {', '.join(pythons)}")
    work = (options.work or Path(tempfile.mkdtemp(prefix="pace-"))).absolute()
    work.mkdir(parents=True, exist_ok=True)
    work.chmod(0o755)  # for the ordinary user
    results: list[tuple[Row, Result]] = []
    for number, row in enumerate(rows):
        say(f"pace: {row.python} {' '.join(row.conditions)}, seed {options.seed}, logs in {work}")
        try:
            python = prepare(row, work, pythons[row.python])
            result = run(row, python, work, list(options.tests), options.seed)
        except CommandError as error:
            result = Result(0, (str(error),), 0, 0.0)
        results.append((row, result))
        print(table(results), flush=True)
        if not options.keep and row.place not in {later.place for later in rows[number + 1 :]}:
            shutil.rmtree(work / row.place)
    return int(any(result.failed for _, result in results))


def prepare(row: Row, work: Path, python: Path) -> Path:
    """Return the interpreter of a row's clone, made unless it is there. Raises CommandError."""
    clone = work / row.place / "tpucache"
    if not (clone / ".venv" / "bin" / "pytest").exists():
        shutil.rmtree(clone, ignore_errors=True)  # one that was begun and not finished
        run_logged(["git", "clone", "--quiet", ROOT, clone], work / "clone.log")
        extras = "xla,dev" if row.python < "3.14" else "dev"
        install = shlex.join([str(python), "-m", "scripts.install", ".venv", extras])
        run_logged(["bash", "-c", f"cd {shlex.quote(str(clone))} && {install}"], work / f"{row.place} install.log")
    if "user" in row.conditions and os.geteuid() == 0:
        # Folders alone: files may be hard links to those of other environments.
        for folder, _, _ in os.walk(work / row.place):
            os.chown(folder, *ordinary_user())
    return clone / ".venv" / "bin" / "python"


def run(row: Row, python: Path, work: Path, tests: list[str], seed: int) -> Result:
    """Run the tests of a row."""
    clone = python.parents[2]
    found = clone.parent / "results.xml"
    if "shuffled" in row.conditions:
        tests = shuffled(clone, tests, seed)
    words: list[str | Path] = [python, "-m", "pytest", "--numprocesses", str(row.jobs), "--dist", "worksteal"]
    words += [f"--junit-xml={found}", *tests]
    environment = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    options: dict[str, object] = {}
    if "user" in row.conditions:
        words, options = as_user(words, python, clone.parent, environment)
    began = time.monotonic()
    log = work / f"{row.python} {' '.join(row.conditions)}.log"
    with contextlib.ExitStack() as stack:
        if "one-core" in row.conditions:
            stack.enter_context(one_core())
        if "busy" in row.conditions:
            stack.enter_context(busy())
        output = stack.enter_context(log.open("w"))
        process = stack.enter_context(
            subprocess.Popen(
                words, cwd=clone, env=environment, stdout=output, stderr=output, start_new_session=True, **options
            )  # type: ignore[call-overload]  # the options of `as_user`
        )
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            say(f"pace: ended after {LIMIT} s")
        finally:  # also where this program is interrupted: its tests may run as another user, unseen
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - began
    try:
        return read(found, seconds)
    except (OSError, ElementTree.ParseError):
        raise CommandError(f"pytest ended with status {process.returncode} and no results: see {log}") from None


def ordinary_user() -> tuple[int, int]:
    """Return the numbers of the user and the group that own nothing."""
    found = pwd.getpwnam("nobody")
    return found.pw_uid, found.pw_gid


def as_user(
    words: list[str | Path], python: Path, folder: Path, environment: dict[str, str]
) -> tuple[list[str | Path], dict[str, object]]:
    """Return the words and the options that run a program as an ordinary user does, and change its environment."""
    temporary = folder / "temporary files"
    temporary.mkdir(exist_ok=True)
    home = str(folder / "no home")
    environment |= {"HOME": home, "TMPDIR": str(temporary), "LC_ALL": "C", "TZ": "Pacific/Kiritimati"}
    for name in ("LANG", "USER", "LOGNAME", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    if os.geteuid():
        return words, {"umask": 0o077}
    user, group = ordinary_user()
    os.chown(temporary, user, group)
    words = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", *words]
    prefix = python.resolve().parents[1]
    if closed := [parent for parent in reversed(prefix.parents) if not parent.stat().st_mode & 1]:
        words = ["unshare", "--mount", "bash", "-c", _SHOW, "show", prefix, closed[0], *words]
    return words, {"umask": 0o077}


def shuffled(clone: Path, tests: Sequence[str], seed: int) -> list[str]:
    """Return the files of tests in a random order."""
    found = [clone / name for name in tests]
    files = [file for path in found for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    files.sort()
    random.Random(seed).shuffle(files)
    return [str(file.relative_to(clone)) for file in files]


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Have this process, and those that it starts, use one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Run two programs that compute."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def read(path: Path, seconds: float) -> Result:
    """Read what pytest has found."""
    passed, skipped, failed = 0, 0, []
    for test in ElementTree.parse(path).iter("testcase"):  # our own file
        kinds = {child.tag for child in test}
        if kinds & {"failure", "error"}:
            failed.append(f"{test.get('classname')}::{test.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return Result(passed, tuple(failed), skipped, seconds)


def table(results: Sequence[tuple[Row, Result]]) -> str:
    """Return a table of rows, and the names of the tests that fell."""
    lines = [HEADER, ("---",) * len(HEADER)]
    for row, each in results:
        counts = (each.passed, len(each.failed), each.skipped, round(each.seconds))
        lines.append((row.python, " ".join(row.conditions), *map(str, counts)))
    fallen = [f"{row.python} {' '.join(row.conditions)}: {name}" for row, each in results for name in each.failed]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *fallen])


if __name__ == "__main__":
    sys.exit(main())
