"""The table of misuse catches wrong results, wrong messages and processes that end; its own rows find none of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the scripts are no part of the package

from scripts.checks.misuse.__main__ import load_rows
from scripts.checks.misuse.lab import Lab, Shared
from scripts.checks.misuse.outcome import Done, Outcome, Wrong, correct, equal, refused, refuses, succeeded
from scripts.checks.misuse.rows import Row, run_row
from scripts.checks.misuse.table import print_table
from tpucache import CachedDataset, Recipe, RecipeError, UsageError

ROOT = Path(__file__).parents[2]
SOME = (
    "a mask of labels as selection",
    "positions beyond both ends",
    "more ranks than samples",
    "loading a state and setting the same epoch",
    "two iterations of one loader side by side",
    "a manifest that names a shard twice",
    "recipes out of range from Python",
)
MESSAGE = "python -m tpucache: photos is empty: give a folder of images\n"


# Rows and the commands in them run in forks of a process that does nothing else.
MAKING = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from scripts.checks.misuse.lab import Shared
folder = Path(sys.argv[2])
shared = Shared(folder / "shared")
shared.cache()
"""
ENDING = f"""{MAKING}
import json
from scripts.checks.misuse.__main__ import load_rows
from scripts.checks.misuse.rows import run_rows
rows = [one for one in load_rows() if one.name in sys.argv[3:]]
print(json.dumps({{one.name: outcome for one, outcome, _ in run_rows(rows, folder, shared, 1)}}))
"""
DYING = f"""{MAKING}
import os
from scripts.checks.misuse.rows import Row, run_rows
rows = [Row("area", str(status), lambda lab, status=status: os._exit(status)) for status in (0, 9)]
for _, outcome, _ in run_rows(rows, folder, shared, 2):
    print(outcome.kind)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, run_forking: Callable[..., str]) -> Lab:
    folder = tmp_path_factory.mktemp("lab")
    run_forking(MAKING, ROOT, folder)
    return Lab(folder, Shared(folder / "shared"))


@pytest.mark.slow
def test_rows_end_well(tmp_path: Path, run_forking: Callable[..., str]) -> None:
    outcomes = json.loads(run_forking(ENDING, ROOT, tmp_path, *SOME))
    assert sorted(outcomes) == sorted(SOME)
    assert {name: outcome for name, outcome in outcomes.items() if outcome[0] not in ("correct", "refused")} == {}


def test_there_are_many_rows_all_named_differently() -> None:
    names = [one.name for one in load_rows()]
    assert len(names) >= 60
    assert len(set(names)) == len(names)
    assert all(one.area and one.matches(one.name.upper()) for one in load_rows())


def wrong_result(lab: Lab) -> Outcome:
    equal("samples", len(CachedDataset(lab.shared.cache())), 23)
    return correct("23 samples")


def accepted(lab: Lab) -> Outcome:
    return refuses(lambda: CachedDataset(lab.shared.cache()), UsageError)


def another_error(lab: Lab) -> Outcome:
    return refuses(lambda: {}["key"], UsageError)


def another_message(lab: Lab) -> Outcome:
    return refuses(lambda: Recipe(size=0), RecipeError, "colour")


def raised(lab: Lab) -> Outcome:
    raise OSError(lab.folder)


@pytest.mark.parametrize("attempt", [wrong_result, accepted, another_error, another_message, raised])
def test_what_is_not_as_expected_is_wrong(lab: Lab, attempt, capsys) -> None:
    one = Row("area", attempt.__name__, attempt)
    outcome = run_row(one, lab)
    assert outcome.kind == "WRONG"
    print_table([(one, outcome)])
    assert f"| 1 | {attempt.__name__} | WRONG | " in capsys.readouterr().out


def test_a_refusal_is_one_line_with_its_status_and_no_traceback() -> None:
    assert refused(Done(1, "", f"to do: 3\n{MESSAGE}"), "photos").kind == "refused"
    bad = [Done(2, "", MESSAGE), Done(1, "", ""), Done(1, "", f"Traceback\n{MESSAGE}"), Done(1, "", f"{MESSAGE}no\n")]
    bad.append(Done(1, "", "python -m tpucache: photos, or else\n"))
    for done in bad:
        with pytest.raises(Wrong):
            refused(done, "photos")
    with pytest.raises(Wrong):
        succeeded(Done(1, "", MESSAGE))


@pytest.mark.slow
def test_a_row_whose_process_dies_is_wrong_and_leaves_nothing(tmp_path: Path, run_forking: Callable[..., str]) -> None:
    assert run_forking(DYING, ROOT, tmp_path).split() == ["WRONG", "WRONG"]
    assert not list(tmp_path.glob("row*"))
