"""The tables and the picture of readers of a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.bench.picture import draw_stream
from scripts.bench.stream import CONTENDERS, _summarise, to_markdown, to_pictured_rows, to_rows
from scripts.bench.table import replace_part
from scripts.commands import CommandError


def turn(rate: float, images: float, first: float = 0.5) -> dict[str, Any]:
    figures = {"rate": rate, "images_per_second": images, "first_seconds": first, "needed": 1.05, "bytes": 1e9}
    return figures | {"loader_seconds": 0.2, "cpu_seconds": 2.0, "seconds": 10.0, "waited_seconds": 0.1}


def turns(rates: list[float], images: float) -> list[dict[str, Any]]:
    return [{"first": turn(rate, images), "second": turn(0, 2 * images), "paced": turn(rate, images)} for rate in rates]


RESULTS = {
    "ranges": turns([100, 200, 100], 1000),
    "tpucache raw": turns([90, 190, 50], 900),
    "local raw": turns([0, 0, 0], 1000),
    "litdata 16": turns([50, 100, 50], 500),
}


def links() -> list[dict[str, Any]]:
    names = ("ranges", "tpucache raw", "litdata 16")
    return [
        {"rate": rate, "latency": latency, "rows": [_summarise(name, RESULTS) for name in names]}
        for rate, latency in ((50, 20), (150, 20), (150, 100))
    ]


def test_shares_are_those_within_a_round() -> None:
    row = _summarise("tpucache raw", RESULTS)
    assert (row["share"], row["of_local"]) == (0.9, 0.9)
    assert row["waited"] == pytest.approx(0.01)
    link, ours, theirs = to_rows(links()[0]["rows"])[1:]
    assert link == ["ranges (the link)", "", "", "100 MB/s", "", "", "", "", "", "", "2.00"]
    assert ours == ["tpucache raw", "0.50", "0.30", "0.90", "1.05", "900", "1,800", "0.90", "1.05", "1.0%", "2.00"]
    assert theirs[3:9] == ["0.50", "1.05", "500", "1,000", "", "1.05"]


def test_a_reader_of_first_epochs_alone_has_their_figures() -> None:
    found = {name: [{"first": each["first"]} for each in rounds] for name, rounds in RESULTS.items()}
    assert to_rows([_summarise("litdata 16", found)])[1] == [
        "litdata 16",
        "0.50",
        "0.30",
        "0.50",
        "1.05",
        "500",
        *[""] * 4,
        "2.00",
    ]


def test_the_picture_has_a_table_of_all_links(tmp_path: Path) -> None:
    assert to_pictured_rows(links()) == [
        ["reader", "50 MB/s, 20 ms", "150 MB/s, 20 ms", "150 MB/s, 100 ms"],
        ["the link", "1,000", "1,000", "1,000"],
        ["tpucache raw", *["900 (0.50 s)"] * 3],
        ["litdata 16", *["500 (0.50 s)"] * 3],
    ]
    report: dict[str, Any] = {"links": links(), "rounds": 1, "versions": {}, "left_out": []}
    report["machine"] = {"cpus": 2, "cpu": "a processor", "system": "Linux", "python": "3"}
    assert "| **tpucache raw** | **900 (0.50 s)** |" in to_markdown(report, "stream.png")
    draw_stream(report, tmp_path / "stream.png")
    with Image.open(tmp_path / "stream.png") as image:
        assert image.width == 1200


def test_each_peer_is_in_the_picture_once() -> None:
    names = [entry.reader for entry in CONTENDERS if entry.is_pictured]
    assert sorted(names) == ["litdata", "mds", "ranges", "tpucache dct-zstd-bands-8", "webdataset"]


def test_a_table_goes_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- stream -->\nold\n<!-- /stream -->\nafter\n")
    replace_part(page, "stream", "| new |\n")
    replace_part(page, "stream", "| newer |\n")
    assert page.read_text() == "before\n<!-- stream -->\n\n| newer |\n\n<!-- /stream -->\nafter\n"
    with pytest.raises(CommandError, match="has no marks <!-- other -->"):
        replace_part(page, "other", "")
