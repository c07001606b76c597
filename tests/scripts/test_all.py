"""One command measures all figures of the page and of README's table."""

from __future__ import annotations

import re

from scripts.bench.all import PAGE, PARTS, README, ROWS, glance
from tpucache.cli import make_parser

BENCH = {"images_per_second": 104000.0, "ratio": 0.81, "idle": 0.0}
FIGURES = {
    **dict.fromkeys(("bench", "bench-1", "bench-files", "bench-28000"), BENCH),
    "loader": {"first_batch_seconds": 0.4, "huge": {"seconds": 0.12, "resident_mb": 12.0}},
    "read": {"readers": [{"name": "ffcv raw 2", "times_slower": 2.0}, {"name": "litdata", "times_slower": None}]},
    "warmup": {
        "sources": [
            {
                "contenders": [{"name": "tpucache, 2 jobs", "images_per_second": 70.0}],
                "ratios": [{"name": "2 jobs / seed", "whole": 7.5}, {"name": "2 jobs / FFCV's writer", "whole": None}],
            }
        ]
    },
    "epochs": {"rows": [{"name": "tpucache, ImageFolder", "seconds": 9.04}, {"name": "efficio", "seconds": 30.0}]},
    "train": {"ratio": 0.98, "device_idle": 0.003},
}


def test_the_page_has_a_place_for_each_part_and_no_other():
    parts = {part.name for part in PARTS if not part.prints_json}
    marks = re.findall(r"^<!-- (/?[\w-]+) -->$", PAGE.read_text(), re.MULTILINE)
    assert {mark for mark in marks if not mark.startswith("/")} == {*parts, "glance"}
    assert [f"/{mark}" for mark in marks[::2]] == marks[1::2]
    assert README.read_text().count("<!-- figures -->") == 1


def test_the_table_has_a_row_for_what_was_measured_alone():
    lines = glance(FIGURES, is_readme=False).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert "| 104,000 images/s, 0.81 of a plain copy in memory |" in lines[2]
    assert "| FFCV 2.0 |" in lines[9]
    assert "| 70 images/s, 7.5 times one process that decodes them whole |" in lines[10]
    assert "| 9.0 s with ImageFolder, efficio 30.0 s |" in lines[11]
    readme = glance({"bench": BENCH}, is_readme=True)
    assert len(readme.splitlines()) == 4
    assert "`tpucache bench CACHE --in-memory yes --device-rate 7500`" in readme


def test_every_row_is_of_parts_that_are_measured_by_commands_that_parse():
    parts = {part.name: part for part in PARTS}
    assert {name for row in ROWS for name in row.parts} <= parts.keys()
    for part in PARTS:
        words = part.shown.split()
        if words[0] == "tpucache":
            make_parser().parse_args(words[1:])
