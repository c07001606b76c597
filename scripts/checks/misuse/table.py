"""The table of rows, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from scripts.checks.misuse.outcome import Outcome
from scripts.checks.misuse.rows import Row

_WIDTH = 260


def print_table(results: Sequence[tuple[Row, Outcome]]) -> None:
    """Print the rows' outcomes, a heading an area."""
    number = 0
    for area, members in groupby(results, key=lambda result: result[0].area):
        print(f"\n### {area}\n\n| row | what was tried | outcome | message or evidence |\n|---|---|---|---|")
        for one, outcome in members:
            number += 1
            print(f"| {number} | {one.name} | {outcome.kind} | {_cell(outcome.text)} |")


def _cell(text: str) -> str:
    """Return a text as it fits into a cell: one line, printable, not too long."""
    line = " ".join(text.split()).replace("|", "\\|").encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 60]} … {line[-58:]}"
