"""Tables for a terminal and in Markdown, and the files that a benchmark writes."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Sequence[str]]  # the heading first


def as_text(rows: Rows) -> str:
    """Return a table for a terminal; cells that begin with a letter are aligned to the left."""
    widths, left = [max(map(len, column)) for column in zip(*rows, strict=True)], _left(rows)
    lines = (
        "  ".join(f"{cell:{'<' if at in left else '>'}{widths[at]}}" for at, cell in enumerate(row)).rstrip()
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines)


def as_markdown(rows: Rows, is_bold: Callable[[str], bool] = lambda name: False) -> str:
    """Return a table in Markdown; rows whose first cell `is_bold` accepts are bold."""
    left = _left(rows)
    rule = ["---" if at in left else "---:" for at in range(len(rows[0]))]
    body = [[f"**{cell}**" if cell and is_bold(row[0]) else cell for cell in row] for row in rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in [rows[0], rule, *body])


def _left(rows: Rows) -> set[int]:
    """Return the columns that are aligned to the left: the first one, and those of words."""
    return {
        at for at, column in enumerate(zip(*rows, strict=True)) if not at or any(c[:1].isalpha() for c in column[1:])
    }


def machine() -> str:
    """Return what figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    cpu = models[0] if models else platform.machine()
    system = f"{platform.system()} {platform.release()}"
    return f"{len(os.sched_getaffinity(0))} CPUs ({cpu}), {system}, Python {platform.python_version()}"


def add_race_options(parser: argparse.ArgumentParser, work: str | None = None, seconds: float | None = None) -> None:
    """Add the options that benchmarks share: the default work folder and the length of a turn where there are such."""
    if work:
        parser.add_argument("--work", type=Path, default=Path(work), help="where files are made (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="medians are over these (%(default)s)")
    if seconds:
        parser.add_argument("--seconds", type=float, default=seconds, help="of each turn, about (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")


def parse_options(parser: argparse.ArgumentParser, least: dict[str, float] | None = None) -> argparse.Namespace:
    """Parse the command line, refuse options below their `least`, and make the work folder's path absolute."""
    options = parser.parse_args()
    for name, smallest in {"rounds": 1, **(least or {})}.items():
        if getattr(options, name) < smallest:
            parser.error(f"--{name} is at least {smallest}, not {getattr(options, name)}")
    if "work" in options:
        options.work = options.work.resolve()
    return options


Table = tuple[str, Rows]  # the line above it, and its rows


def show(
    options: argparse.Namespace,
    figures: dict[str, Any],
    tables: Sequence[Table],
    notes: Sequence[str] = (),
    is_bold: Callable[[str], bool] = lambda name: name.startswith("tpucache"),
) -> None:
    """Print tables and notes with the machine, and write what `--json` and `--markdown` ask for."""
    notes = [*notes, f"{machine()}."]
    print(*(f"{title}\n{as_text(rows)}".lstrip("\n") for title, rows in tables), *notes, sep="\n", flush=True)
    parts = [f"{title}\n\n{as_markdown(rows, is_bold)}".lstrip("\n") for title, rows in tables]
    listed = "".join(f"- {note}\n" for note in notes)
    for path, text in (
        (options.json, json.dumps(figures, indent=2) + "\n"),
        (options.markdown, "\n".join([*parts, listed])),
    ):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def peer_notes(versions: Mapping[str, Mapping[str, str]], left_out: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each peer's versions, and for each that was left out."""
    lines = [f"{peer}: {', '.join(map(' '.join, found.items()))}" for peer, found in versions.items()]
    # Without the place of the log: pages have no folders of the machine that they were made on.
    return lines + [f"left out: {row['name']}: {row['reason'].partition(' (see ')[0]}" for row in left_out]
