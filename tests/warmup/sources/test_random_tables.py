"""Random tables mean what pandas reads of them, or something else for a reason that is listed."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from thorough import thorough

pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

from scripts.checks.tables import Table, differences, random_table, written


def unlisted(found: Counter[str]) -> list[str]:
    return [what for what in found if what.startswith("DIFFERS")]


@pytest.mark.parametrize("seed", [0, *thorough(1, 2, 3)])
def test_tables_with_hostile_names_and_values_are_read_as_by_pandas(seed: int, tmp_path: Path) -> None:
    for number in range(15):
        assert unlisted(differences(random_table(random.Random(f"{seed} {number}")), tmp_path)) == []


@pytest.mark.parametrize(
    "cells",
    [["0", "-inf", "2"], ["inf"], ["inf", "0.5"], ["-1", "0", "inf"], ["\u0663", "4"], ["\xa03", "4"], ["1e400", "2"]],
    ids=ascii,
)
def test_what_a_float_of_python_may_be_is_read_as_by_pandas(cells: list[str], tmp_path: Path) -> None:
    rows = [[f"{number}.png", cell] for number, cell in enumerate(cells)]
    assert unlisted(differences(Table(["path", "y"], rows, written(["path", "y"], rows)), tmp_path)) == []


def test_another_reading_is_found(tmp_path: Path) -> None:
    rows = [["a.png", "ant"], ["b.png", "bee"]]
    assert unlisted(
        differences(Table(["path", "y"], rows, written(["path", "y"], [*rows[:1], ["b.png", "cat"]])), tmp_path)
    )
