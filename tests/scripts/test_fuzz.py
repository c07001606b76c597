"""The fuzzer notices whatever is neither read nor refused in one line, and makes each input again by its number."""

from __future__ import annotations

import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the scripts are no part of the package

from scripts.checks.fuzz.__main__ import load_targets, main
from scripts.checks.fuzz.mutate import mutate_bytes, mutate_json, mutate_text
from scripts.checks.fuzz.target import Target, Tries
from tpucache import FormatError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tries(tmp_path: Path) -> Iterator[Callable[[Callable[[], None]], Tries]]:
    """The function `tries(call)`: tries of a target that makes this call from its first counted input on."""
    before = signal.getsignal(signal.SIGALRM)

    def start(call: Callable[[], None]) -> Tries:
        calls = iter([lambda: None])
        return Tries(Target("x", lambda folder: None, lambda *_: next(calls, call)()), tmp_path)

    yield start
    signal.signal(signal.SIGALRM, before)


def refuse() -> None:
    raise FormatError("the manifest holds nothing: copy the cache again")


def refuse_in_two_lines() -> None:
    raise FormatError("the manifest holds\nnothing: copy the cache again")


def warn() -> None:
    warnings.warn("careful", stacklevel=1)


def end() -> None:
    sys.exit(3)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: None, None),
        (refuse, ""),
        (refuse_in_two_lines, "no line for people"),
        (lambda: int("x"), "ValueError"),
        (warn, "UserWarning"),
        (end, "SystemExit"),
    ],
)
def test_whatever_is_neither_read_nor_refused_is_a_fault(tries, call, found) -> None:
    result = tries(call).run(0)
    assert result == found if not found else found in result


@pytest.mark.slow
def test_an_input_that_takes_long_is_a_fault(tries, monkeypatch) -> None:
    monkeypatch.setattr("scripts.checks.fuzz.target.MOST_SECONDS", 0.05)
    assert "TimeoutError" in tries(lambda: [None for _ in iter(int, 1)]).run(0)


def test_an_input_is_made_again_by_its_number() -> None:
    for mutate, value in ((mutate_bytes, bytes(99)), (mutate_text, "abc 12"), (mutate_json, {"a": [1, {"b": "x"}]})):
        once, again = ([repr(mutate(value, random.Random(n))) for n in range(50)] for _ in range(2))
        assert once == again
        assert len(set(once)) > 20
        assert value in (bytes(99), "abc 12", {"a": [1, {"b": "x"}]})


def test_there_is_a_target_for_each_kind_of_input() -> None:
    assert {"manifest", "index", "samples", "records", "answers"} <= load_targets().keys()


@pytest.mark.slow
@pytest.mark.thorough
def test_the_command_tries_each_input_in_a_process_of_its_own(monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--only", "index", "--inputs", "3"])
    assert main() == 0
    said = capsys.readouterr().out
    assert "3 inputs in" in said
    assert "0 faults" in said
