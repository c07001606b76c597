"""A release is cut from what is committed alone, and what stands in its way changes nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from patience import PATIENCE

from scripts import release as releasing
from scripts.commands import CommandError

NOTES = "### What you have to do\n\nNothing.\n\n### Added\n\n- A thing."
CHANGELOG = """# Changelog

## [Unreleased]

### What you have to do

Nothing.

### Added

- A thing.

## [0.1.0] - 2026-01-01

- The first.
"""


def git(root: Path, *words: str) -> str:
    names = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(
        ["git", *names, *words], cwd=root, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    return done.stdout


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit and the tag of an earlier release."""
    for name, value in (("NAME", "t"), ("EMAIL", "t@example.org")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    (tmp_path / "tpucache").mkdir()
    (tmp_path / "tpucache" / "version.py").write_text('"""The version of tpucache."""\n\n__version__ = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    git(tmp_path, "tag", "v0.1.0")
    return tmp_path


class Runs:
    """Runs git, and nothing else of what is asked for."""

    def __init__(self) -> None:
        self.others: list[tuple[str, ...]] = []

    def __call__(self, root: Path, *command: str) -> str:
        if command[0] == "git":
            return releasing.run_program(root, *command)
        self.others.append(command)
        return ""


@pytest.mark.slow
def test_a_release_is_a_commit_a_build_and_a_tag_with_its_notes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Runs()
    releasing.release(root, "0.2.0", is_dry=False, run=run)
    assert run.others[:2] == [(".ci/run",), ("make", "test-all")]
    assert [command[2:4] for command in run.others[2:]] == [("scripts.checks", "build")]
    assert '__version__ = "0.2.0"' in (root / "tpucache" / "version.py").read_text()
    changelog = (root / "CHANGELOG.md").read_text()
    assert changelog.index("## [Unreleased]") < changelog.index("## [0.2.0] - ") < changelog.index("- A thing.")
    assert releasing.unreleased(changelog) == ""
    assert git(root, "status", "--porcelain") == ""
    assert git(root, "rev-parse", "v0.2.0^{commit}") == git(root, "rev-parse", "HEAD")
    assert git(root, "tag", "--list", "--format=%(contents)", "v0.2.0").strip() == f"0.2.0\n\n{NOTES}"
    assert capsys.readouterr().out.splitlines()[-1] == "python -m twine upload dist/tpucache-0.2.0*"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "change", "message"),
    [
        ("0.2", None, "not a version such as 0.2.0"),
        ("0.1.0", None, "not above 0.1.0"),
        ("0.0.9", None, "not above 0.1.0"),
        ("0.2.0", ("tpucache/version.py", "changed"), "not committed: tpucache/version.py"),
        ("0.2.0", ("new.txt", "new"), "not committed: new.txt"),
        ("0.2.0", ("CHANGELOG.md", CHANGELOG.replace(NOTES, "")), r"CHANGELOG\.md has nothing under"),
        ("0.2.0", ("CHANGELOG.md", CHANGELOG.replace("### What you have to do", "### Else")), 'has no "### What you'),
        ("0.2.0", ("CHANGELOG.md", "# Changelog\n"), "has no heading"),
    ],
)
def test_what_stands_in_the_way_of_a_release_is_said_and_nothing_is_changed(
    root: Path, version: str, change: tuple[str, str] | None, message: str
) -> None:
    if change is not None:
        (root / change[0]).write_text(change[1])
        if change[0] == "CHANGELOG.md":
            git(root, "commit", "--quiet", "--all", "--message", "other notes")
    before, run = git(root, "log"), Runs()
    with pytest.raises(CommandError, match=message):
        releasing.release(root, version, is_dry=False, run=run)
    assert run.others == []
    assert (git(root, "log"), git(root, "tag").split()) == (before, ["v0.1.0"])


@pytest.mark.slow
def test_a_dry_run_changes_nothing(root: Path) -> None:
    run = Runs()
    releasing.release(root, "0.2.0", is_dry=True, run=run)
    assert run.others == []
    assert (git(root, "tag").split(), git(root, "status", "--porcelain")) == (["v0.1.0"], "")
