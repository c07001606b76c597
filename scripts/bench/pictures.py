"""Draw the pictures of docs/numbers.md and docs/scale.md again, from the tables on these pages.

So a picture shows what its page says. The benchmarks draw the same ones from what they have just measured (--picture).

    python -m scripts.bench pictures --folder docs/images
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench.picture import draw_formats, draw_rates, draw_scale
from scripts.bench.read_contenders import LIMIT
from scripts.commands import ROOT, CommandError, say

Figures = dict[str, Any]


def main() -> None:
    """Draw them as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs/images", help="where to write (%(default)s)")
    folder = parser.parse_args().folder
    numbers, scale = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("numbers.md", "scale.md"))
    for draw, figures, name in (
        (draw_rates, read_rates(numbers), "read.png"),
        (draw_formats, read_formats(numbers), "formats.png"),
        (draw_scale, read_scale(scale), "scale.png"),
    ):
        draw(figures, folder / name)
        say(f"{folder / name}: {(folder / name).stat().st_size:,} bytes")


def read_rates(page: str) -> Figures:
    """Return what the first table of readers says, as `scripts.bench read` reports it."""
    readers = []
    for row in _first_table(page, "reader"):
        name, setting = row["reader"], row["setting"]
        low, high = map(_number, row["min - max"].split(" - "))
        rates = {"images_per_second": _number(row["images/s"]), "min": low, "max": high}
        threads = int(name[-1]) if name.startswith(LIMIT) else None
        readers.append(
            {"name": name, **rates, "threads": threads, "setting": dict([setting.split(", ")[0].rsplit(" ", 1)])}
        )
    return {"readers": readers, **_measured(page)}


def read_formats(page: str) -> Figures:
    """Return what the first table of formats says, as `scripts.bench formats` reports it."""
    formats = [
        {
            "name": row["format"],
            "bytes_per_image": 1e3 * _number(row["kB an image"]),
            "images_per_second": {"2": _number(row["2 threads"])},
        }
        for row in _first_table(page, "format")
    ]
    return {"formats": formats, **_measured(page)}


def read_scale(page: str) -> Figures:
    """Return what the two tables of threads and windows say, as `scripts.bench scale` reports it."""
    title = r"images/s of a host's ([\d,]+): (\S+) ms a request, (\S+) GB/s, (\d+) requests at once, hints (\w+):\n"
    reading: list[Figures] = []
    found = list(re.finditer(title + r"(.*\n)((?:.+\n)+)", page))
    if len(found) != 2:
        raise CommandError(f"docs/scale.md has {len(found)} tables of threads and windows, and 2 are drawn")
    for each in found:
        threads = [int(count) for count in re.findall(r"(\d+) threads", each[6])]
        for line in each[7].splitlines():
            window, *cells = re.split(r"\s{2,}", line)
            for count, rate in zip(threads, cells, strict=False):
                row = {"window": window, "threads": count, "images_per_second": _number(rate)}
                reading.append({**row, "read_ahead": each[5] == "heeded"})
    hosts = re.search(r"(\d+) hosts of \d+ ranks", page)
    if hosts is None:
        raise CommandError("docs/scale.md does not say how many hosts there are")
    first = found[0]
    sharing = {"latency": float(first[2]) / 1e3, "bandwidth": float(first[3]) * 1e9, "requests": int(first[4])}
    return {"reading": reading, "device_rate": _number(first[1]), "hosts": int(hosts[1]), "sharing": sharing}


def _first_table(page: str, head: str) -> Iterator[dict[str, str]]:
    """Yield the rows of the first table in Markdown whose first column has this head. Raises CommandError."""
    lines = iter(page.splitlines())
    heading = next((line for line in lines if line.startswith(f"| {head} |")), None)
    if heading is None:
        raise CommandError(f"docs/numbers.md has no table that begins with the column {head!r}")
    next(lines)  # the rule
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines):
        yield dict(zip(_cells(heading), _cells(line), strict=True))


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("*") for cell in line.strip("|").split("|")]


def _measured(page: str) -> Figures:
    """Return the size, batch and processors that the line below the table of readers names. Raises CommandError."""
    found = re.search(r"images of (\d+)x\d+ uint8, shuffled batches of (\d+),.*?(\d+) CPUs", page)
    if found is None:
        raise CommandError("docs/numbers.md does not say how its readers were measured")
    return {"size": int(found[1]), "batch": int(found[2]), "machine": {"cpus": int(found[3])}}


def _number(text: str) -> float:
    return float(text.replace(",", ""))
