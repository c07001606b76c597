"""What all benchmarks share: turns, tables, and the processes that answer by lines of JSON."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE
from PIL import Image

from scripts.bench.rounds import Contender, Track, leaving_out, race, ratio
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
    assert as_text(rows) == (
        "reader  images/s  setting\n"
        "ours       1,000  threads 2\n"
        "theirs         9\n"
    )  # fmt: skip
    assert as_markdown(rows, lambda name: name == "ours") == (
        "| reader | images/s | setting |\n"
        "| --- | ---: | --- |\n"
        "| **ours** | **1,000** | **threads 2** |\n"
        "| theirs | 9 |  |\n"
    )


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for number in range(8):
        path = tmp_path / "photographs" / f"class-{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 30, 3), 30 * number, np.uint8)).save(path)
    return tmp_path / "photographs"


@pytest.mark.slow
def test_a_worker_answers_each_command_and_ends_with_the_reason(photographs: Path, tmp_path: Path):
    setting = {"folder": str(tmp_path / "written"), "size": 16, "jobs": 1, "variants": 0}
    worker = Worker(Path(sys.executable), ("bare", "pillow"), setting, tmp_path / "log")
    try:
        assert worker.ask("go", photographs / "class-0")["images"] == 4
        assert worker.rate(photographs / "class-1") > 0
        with pytest.raises(CommandError, match="FileNotFoundError"):
            worker.ask("go", photographs / "class-2")
    finally:
        worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["", "warmup"])
def test_both_ways_of_tpucache_give_all_crops_of_all_epochs(way: str, photographs: Path, tmp_path: Path):
    task = {"photographs": str(photographs), "folder": str(tmp_path / "cache"), "side": 24, "size": 16, "batch": 3}
    task |= {"epochs": 2, "workers": 1, "began": time.monotonic(), "way": way}
    run = Track(tmp_path).ask_once(Contender("tpucache", "tpucache", "epochs"), task, PATIENCE)
    assert run["images"] == 16
    assert 0 < run["first_batch"] <= run["epoch_ends"][0] <= run["epoch_ends"][1]


def test_an_environment_is_made_anew_when_what_it_holds_changes(tmp_path: Path):
    made: list[str] = []

    def run(command: Sequence[str | Path], log: Path) -> None:
        if "venv" in command:
            made.append(str(command[-1]))
            (Path(str(command[-1])) / "lib" / "python3" / "site-packages").mkdir(parents=True)

    listed = tmp_path / "pyproject.toml"
    listed.write_text("one")
    environments = Environments(tmp_path / "env", run=run)
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
        ("bench", {"read", "warmup", "idle", "train", "loader"}),
        ("checks", {"build", "offline", "sources"}),
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
