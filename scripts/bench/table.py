"""Tables for a terminal and in Markdown, and the files that a benchmark writes."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.commands import CommandError

Rows = Sequence[Sequence[str]]  # the heading first


def as_text(rows: Rows, left: Sequence[int] = (0,)) -> str:
    """Return a table for a terminal; the columns `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{'<' if at in left else '>'}{widths[at]}}" for at, cell in enumerate(row)).rstrip()
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines)


def as_markdown(rows: Rows, left: Sequence[int] = (0,), is_bold: Callable[[str], bool] = lambda name: False) -> str:
    """Return a table in Markdown; rows whose first cell `is_bold` accepts are bold."""
    rule = ["---" if at in left else "---:" for at in range(len(rows[0]))]
    body = [[f"**{cell}**" if cell and is_bold(row[0]) else cell for cell in row] for row in rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in [rows[0], rule, *body])


def machine() -> dict[str, Any]:
    """Return what figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": models[0] if models else platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def machine_line(here: dict[str, Any]) -> str:
    """Return `machine()` as a line of text."""
    return f"{here['cpus']} CPUs ({here['cpu']}), {here['system']}, Python {here['python']}"


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


def write_files(options: argparse.Namespace, figures: dict[str, Any], markdown: str) -> None:
    """Write what `--json` and `--markdown` ask for."""
    for path, text in ((options.json, json.dumps(figures, indent=2) + "\n"), (options.markdown, markdown)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def replace_part(page: Path, name: str, text: str) -> None:
    """Replace what is between the marks `<!-- name -->` and `<!-- /name -->` of a page. Raises CommandError."""
    before, start, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->")
    _, stop, after = rest.partition(f"<!-- /{name} -->")
    if not (start and stop):
        raise CommandError(f"{page} has no marks <!-- {name} --> and <!-- /{name} -->")
    page.write_text(f"{before}{start}\n\n{text.strip()}\n\n{stop}{after}", encoding="utf-8")


def as_notes(report: dict[str, Any]) -> list[str]:
    """Return a line of Markdown for each peer's versions, and for each that was left out."""
    lines = [
        f"- {peer}: {', '.join(f'{name} {version}' for name, version in versions.items())}"
        for peer, versions in report["versions"].items()
    ]
    # Without the place of the log: pages have no folders of the machine that they were made on.
    return lines + [f"- left out: {row['name']}: {row['reason'].partition(' (see ')[0]}" for row in report["left_out"]]


def to_markdown(report: dict[str, Any], table: str, remark: str = "") -> str:
    """Return a table of readers in Markdown, what was measured and how, with a remark to it, and the versions."""
    measured = (
        f"{report['images']:,} images of {report['size']}x{report['size']} uint8, shuffled batches of "
        f"{report['batch']}, epochs of {report['passes']} passes, warm page cache; median of {report['rounds']} rounds "
        f"of {report['seconds']:g} s that take turns. {remark}{machine_line(report['machine'])}."
    )
    return "\n".join([table, measured, "", *as_notes(report)]) + "\n"
