"""The pictures of the docs are drawn from the tables on their pages, with names that people know."""

from __future__ import annotations

import pytest
from PIL import Image

from scripts.bench.picture import draw_rates, draw_scale, format_name, reader_name
from scripts.bench.pictures import read_formats, read_rates, read_scale
from scripts.bench.read_contenders import CONTENDERS, LIMIT
from scripts.commands import ROOT, CommandError


@pytest.fixture(scope="module")
def pages():
    return {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("numbers", "scale")}


def test_what_is_drawn_is_what_the_pages_say(pages):
    rates, formats, scale = read_rates(pages["numbers"]), read_formats(pages["numbers"]), read_scale(pages["scale"])
    for row in rates["readers"]:
        assert f"{row['images_per_second']:,.0f}" in pages["numbers"]
        assert row["min"] <= row["images_per_second"] <= row["max"]
    assert {row["name"] for row in rates["readers"]} >= {"tpucache in memory 2", "ffcv raw 2", "gather 2"}
    assert {row["name"] for row in formats["formats"]} >= {"tpucache raw", "ffcv raw", "tpucache dct-lz4"}
    for row in formats["formats"]:
        assert f"{row['images_per_second']['2']:,.0f}" in pages["numbers"]
        assert row["images_per_second"]["2"] > 1000
    assert len(scale["reading"]) == 2 * 4 * 3
    assert {row["read_ahead"] for row in scale["reading"]} == {True, False}


def test_a_page_without_its_table_is_refused():
    for read in (read_rates, read_formats, read_scale):
        with pytest.raises(CommandError, match=r"docs/\w+\.md"):
            read("# No table\n")


def test_no_reader_is_called_by_an_inner_name():
    names = [contender.name for contender in CONTENDERS if contender.peer != LIMIT]
    assert {reader_name(name) for name in names if reader_name(name) == name} == {"tf.data"}
    assert not any(reader_name(name)[-1].isdigit() for name in names if "yuv420" not in name)


def test_formats_are_called_as_people_know_them():
    assert format_name("ffcv raw") == "FFCV raw"
    assert format_name("tpucache dct-lz4") == "tpucache dct-lz4"
    assert format_name("tpucache dct-lz4-bands 1/2") == "dct-lz4, half the side"


@pytest.mark.slow
def test_pictures_are_of_a_known_width(pages, tmp_path):
    draw_rates(read_rates(pages["numbers"]), tmp_path / "read.png")
    draw_scale(read_scale(pages["scale"]), tmp_path / "scale.png")
    for name, width in (("read.png", 800), ("scale.png", 1200)):
        with Image.open(tmp_path / name) as image:
            assert image.width == width
