"""What all benchmarks share: turns, tables, and the processes that answer by lines of JSON."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from scripts.bench.rounds import leaving_out, race, ratio
from scripts.bench.table import as_markdown, as_text
from scripts.bench.worker import Worker
from scripts.commands import ROOT, CommandError
from scripts.dispatch import find_commands
from scripts.environments import Environment, Environments


def test_everyone_has_a_turn_each_round_and_who_fails_is_left_out():
    turns: list[str] = []
    left_out: list[dict[str, str]] = []

    def fail() -> int:
        turns.append("c")
        if turns.count("c") == 2:
            raise CommandError("out of memory")
        return 3

    def take(name: str) -> int:
        turns.append(name)
        return len(turns)

    results = race({"a": lambda: take("a"), "b": lambda: take("b"), "c": fail}, 3, left_out)
    assert sorted(turns[:3]) == sorted(turns[3:6]) == ["a", "b", "c"]
    assert sorted(turns[6:]) == ["a", "b"]
    assert {name: len(each) for name, each in results.items()} == {"a": 3, "b": 3}
    assert left_out == [{"name": "c", "reason": "out of memory"}]


def test_only_what_a_contender_cannot_help_leaves_it_out():
    with pytest.raises(ValueError, match="a mistake of ours"), leaving_out("a", []):
        raise ValueError("a mistake of ours")


def test_a_ratio_is_the_median_of_those_within_a_round():
    assert ratio([2.0, 20.0, 30.0], [1.0, 4.0, 30.0]) == 2.0
    assert ratio([2.0], None) is None


def test_tables_align_their_columns():
    rows = [["reader", "images/s", "setting"], ["ours", "1,000", "threads 2"], ["theirs", "9", ""]]
    assert as_text(rows, left=(0, 2)) == (
        "reader  images/s  setting\n"
        "ours       1,000  threads 2\n"
        "theirs         9\n"
    )  # fmt: skip
    assert as_markdown(rows, (0, 2), lambda name: name == "ours") == (
        "| reader | images/s | setting |\n"
        "| --- | ---: | --- |\n"
        "| **ours** | **1,000** | **threads 2** |\n"
        "| theirs | 9 |  |\n"
    )


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A contender's module that prints what is no answer, doubles numbers, and ends at `fail`."""
    package = tmp_path / "scripts" / "bench" / "peers"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "protocol.py").write_text((ROOT / "scripts" / "bench" / "peers" / "protocol.py").read_text())
    (package / "double.py").write_text(
        "from scripts.bench.peers.protocol import serve\n"
        "def double(number):\n"
        "    print('a line of a library')\n"
        "    return {'doubled': 2 * int(number)}\n"
        "serve(lambda setting: {'double': double, 'setting': lambda _: setting})\n"
    )
    monkeypatch.setattr("scripts.bench.worker.ROOT", tmp_path)
    return "double"


def test_a_worker_answers_each_command_and_ends_with_the_reason(module: str, tmp_path: Path):
    worker = Worker(Path(sys.executable), module, {"size": 7}, tmp_path / "log")
    try:
        assert worker.ask("setting") == {"size": 7}
        assert worker.ask("double", 21) == {"doubled": 42}
        with pytest.raises(CommandError, match="ValueError: invalid literal for int"):
            worker.ask("double", "nothing")
    finally:
        worker.close()


def test_an_environment_is_made_anew_when_what_it_holds_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []

    def run_logged(command: list[object], log: Path) -> None:
        if "venv" in command:
            made.append(str(command[-1]))
            (Path(str(command[-1])) / "lib" / "python3" / "site-packages").mkdir(parents=True)

    monkeypatch.setattr("scripts.environments.run_logged", run_logged)
    listed = tmp_path / "pyproject.toml"
    listed.write_text("one")
    environments = Environments(tmp_path / "env")
    environment = Environment("peer", (("numpy==2",),), depends_on=(listed,))
    assert environments.prepare(environment) == tmp_path / "env" / "peer" / "bin" / "python"
    environments.prepare(environment)
    assert len(made) == 1
    listed.write_text("other")
    environments.prepare(environment)
    environments.prepare(Environment("peer", (("numpy==3",),), depends_on=(listed,)))
    assert len(made) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("bench", {"read", "formats", "finish", "warmup", "idle", "train", "loader", "photos"}),
        ("checks", {"accuracy", "build", "offline", "stops"}),
    ],
)
def test_the_commands_of_a_package_are_listed_with_what_they_do(package: str, names: set[str]):
    commands = find_commands(ROOT / "scripts" / package)
    assert names <= set(commands)
    assert all(commands.values())
    done = subprocess.run(
        [sys.executable, "-m", f"scripts.{package}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert all(f"{name} " in done.stdout and summary in done.stdout for name, summary in commands.items())
