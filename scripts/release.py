"""Makes a release: checks what is committed, sets the version, builds, tags, and prints the commands that upload it.

    python -m scripts.release 0.2.0 --dry-run
    python -m scripts.release 0.2.0

It checks that everything is committed, that the version is above the last one, that the changelog has entries under
"Unreleased" and says there what a user has to do, and that `.ci/run` and `make test-all` pass (`--skip-ci` where they
just have). Then it commits the version and the changelog's new heading, builds sdist and wheel into dist/, compares
them with the commit, and tags the commit with the changelog's entries as notes. Nothing leaves this machine: the last
lines that it prints are the commands that push and upload.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from scripts.commands import ROOT, CommandError, make_parser, say

_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_UNRELEASED: Final = "## [Unreleased]"
_HEADING: Final = re.compile(r"^## \[(.*?)\]", re.MULTILINE)
_TO_DO: Final = "### What you have to do"

Run = Callable[..., str]  # of a folder and the words of a command


def main() -> int:
    """Make a release, or say what would be done."""
    parser = make_parser(__doc__)
    parser.add_argument("version", help="the version to release, such as 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="check, and print what would be done")
    parser.add_argument(
        "--skip-ci", action="store_true", help="run no tests, because all of them have just passed here"
    )
    options = parser.parse_args()
    try:
        release(ROOT, options.version, is_dry=options.dry_run, runs_ci=not options.skip_ci)
    except CommandError as error:
        sys.exit(f"release: {error}")
    return 0


def release(root: Path, version: str, *, is_dry: bool, runs_ci: bool = True, run: Run | None = None) -> None:
    """Release the commit of a repository as a version. Raises CommandError before anything is changed."""
    run = run or run_program
    text = (root / "CHANGELOG.md").read_text()
    check(root, version, text)
    notes = unreleased(text)
    say(f"the notes of {version}:\n\n{notes}")
    if is_dry:
        say("dry run: nothing was built, committed or tagged")
        return
    if runs_ci:
        run(root, ".ci/run")
        run(root, "make", "test-all")
    today = datetime.datetime.now(tz=datetime.UTC).date()
    (root / "CHANGELOG.md").write_text(text.replace(_UNRELEASED, f"{_UNRELEASED}\n\n## [{version}] - {today}", 1))
    version_file = root / "tpucache" / "version.py"
    version_file.write_text(re.sub(r'"\d[^"]*"', f'"{version}"', version_file.read_text()))
    run(root, "git", "commit", "--quiet", "--all", "--message", f"Release {version}")
    run(root, sys.executable, "-m", "scripts.checks", "build", "--keep", "dist")
    run(root, "git", "tag", "--annotate", f"v{version}", "--cleanup=verbatim", "--message", f"{version}\n\n{notes}")
    print("Released here. What is left, from this folder:")
    print(f"git push origin HEAD v{version}")
    print(f"python -m twine upload dist/tpucache-{version}*")


def check(root: Path, version: str, changelog: str) -> None:
    """Raise CommandError unless the commit can be released as this version."""
    found = _VERSION.fullmatch(version)
    if found is None:
        raise CommandError(f"{version!r} is not a version such as 0.2.0")
    if changes := run_program(root, "git", "status", "--porcelain"):
        raise CommandError(f"there are changes that are not committed: {', '.join(changes.split()[1::2])}")
    released = [
        tuple(map(int, tag.groups())) for name in run_program(root, "git", "tag").split() if (tag := _tag(name))
    ]
    if released and tuple(map(int, found.groups())) <= max(released):
        last = ".".join(map(str, max(released)))
        raise CommandError(f"{version} is not above {last}, which was released already")
    if not unreleased(changelog):
        raise CommandError(f"CHANGELOG.md has nothing under {_UNRELEASED}: there is nothing to release")
    if _TO_DO not in unreleased(changelog):
        raise CommandError(
            f'CHANGELOG.md has no "{_TO_DO}" under {_UNRELEASED}: say what users must change, or that it is nothing'
        )


def unreleased(changelog: str) -> str:
    """Return what a changelog says under "Unreleased", up to the version before. Raises CommandError without one."""
    if _UNRELEASED not in changelog:
        raise CommandError(f"CHANGELOG.md has no heading {_UNRELEASED}")
    rest = changelog.split(_UNRELEASED, 1)[1]
    following = _HEADING.search(rest)
    return rest[: following.start() if following else len(rest)].strip()


def run_program(root: Path, *command: str) -> str:
    """Run a program in a folder and return what it prints. Raises CommandError with its last line when it fails."""
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["it ended without output"]
        raise CommandError(f"`{' '.join(command[:4])}` failed: {lines[-1]}")
    return done.stdout


def _tag(name: str) -> re.Match[str] | None:
    return _VERSION.fullmatch(name.removeprefix("v"))


if __name__ == "__main__":
    sys.exit(main())
