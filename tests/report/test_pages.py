"""Pages say what they should and nothing that a cache put into them."""

from __future__ import annotations

import html
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tpucache
from tpucache import DependencyError, report_cache
from tpucache.report.page import Line, Part, Section, bars, chart, fill, make_page, matrix
from tpucache.text import printable

TEMPLATES = sorted(Path(tpucache.__file__).parent.glob("*/templates/*"))
#: What the card of a published cache has in its code blocks: names that are checked, and in which nothing is escaped.
CHECKED = {"dataset_id", "variant", "metadata"}


@pytest.fixture(scope="module")
def rich(tmp_path_factory, plain_cache, hostile):
    """A cache whose every text is hostile."""
    return plain_cache(
        tmp_path_factory.mktemp("full") / hostile.replace("/", "_").replace("\udcff", ""),
        paths=[f"{hostile}{number}" for number in range(12)],
        skipped=[(f"{hostile} left out", f"{hostile} is why")] * 3,
        recipe={"size": [20, 24], hostile: hostile, "augmentation": {hostile: [hostile]}},
        source_bytes=range(0, 1200, 100),
    )


@pytest.fixture(scope="module")
def full(rich):
    return report_cache(rich)


def test_the_page_tells_all_about_a_cache_and_shows_hostile_names_as_text(full, hostile, parse):
    page, name = parse(full.html), printable(hostile)
    page.check_harmless()
    full.html.encode()
    assert page.tags.count("img") == 36
    assert page.tags.count("polyline") == 4  # sizes, and three channels
    assert f"{name}3" in page.sections["Samples"]
    assert f"{name} 3 25.0 %" in page.sections["Classes"]
    assert "100 bytes 332 bytes 1.1 kB" in page.sections["Original sizes"]
    assert "12 of the clean records" in page.sections["Channels"]
    assert "mean, std 10.0 20.0 30.0; 1.0 2.0 3.0 fingerprint" in page.sections["How it was made"]
    assert f"{name} left out {name} is why" in page.sections["Skipped"]
    assert name in page.sections["How it was made"]
    assert "v02-00000.lmdb" in page.sections["On disk"]
    assert "0" * 64 in page.sections["How it was made"]


@pytest.mark.parametrize("name", ["rich", "drawn", "tokens"])
def test_its_code_runs_unchanged(name, request, monkeypatch):
    cache = request.getfixturevalue(name)
    monkeypatch.chdir(cache.parent)
    page = report_cache(cache, 1).html
    exec(html.unescape(re.search(r"<pre><code>(.*?)</code></pre>", page, re.S)[1]), {})


def test_what_is_not_known_is_left_out(tokens, parse):
    page = parse(report_cache(tokens).html)
    assert "img" not in page.tags
    assert set(page.sections) == {"", "How to use it", "How it was made", "On disk"}
    assert "a dictionary of tensors: tokens, label" in page.text
    for setting in ("fit", "augment", "max_boxes", "mask_values"):  # of images alone
        assert f" {setting} " not in page.text


@pytest.mark.slow
def test_many_of_anything_are_folded_away(plain_cache, tmp_path, parse):
    names = [f"class {number}" for number in range(60)]
    rare = {"labels": np.arange(300) % 50, "classes": names, "skipped": [("path", "reason")] * 1500}
    page = parse(report_cache(plain_cache(tmp_path / "cache", samples=300, variants=1, **rare), 2).html)
    assert "256 of the clean records" in page.sections["Channels"]
    assert "6 to 0 samples" in page.sections["Classes"]
    assert "20 more" in page.sections["Classes"]
    assert "500 of them are left out here" in page.sections["Skipped"]
    assert (
        page.sections["Skipped"].count("path reason") == 1000 + 2
    )  # headings, of what is shown at once and of the rest
    assert page.tags.count("details") == 3  # the augmentation, too


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(full):
    attributes = {}
    found = HTMLParser()
    found.handle_starttag = lambda tag, attrs: attributes.update(attrs)
    found.feed(full._repr_html_())
    assert attributes["srcdoc"] == full.html
    assert attributes["sandbox"] is None  # nothing is allowed
    assert len(repr(full)) < 300


# Blocks.


def page_of(*blocks):
    return make_page("test", [Part("name", "", [], [Section("title", "", blocks)])]).html


finite = st.floats(-1e38, 1e38)


@given(st.lists(st.tuples(finite, finite), min_size=1))
def test_curves_lie_within_their_chart_and_its_axes_name_their_ends(points):
    text = page_of(chart("curve", [Line("line", [*points, (np.nan, 1.0)])]), chart("empty", [Line("", [(3, np.nan)])]))
    assert "empty" not in text
    places = [tuple(map(float, place.split(","))) for place in re.search('points="(.*?)"', text)[1].split()]
    assert len(places) == max(2, len(points))  # a point alone is a line
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in places)
    for values, form in zip(zip(*points, strict=True), ("{:,.7g}", "{:,.4g}"), strict=True):
        assert all(f"<span>{form.format(end)}</span>" in text for end in (min(values), max(values)))


def test_bars_are_as_long_as_their_share_of_the_largest_and_cells_as_strong_as_theirs_of_the_row(parse):
    text = page_of(bars({"two": 2.0, "one": 8.0}, 20), matrix(["a", "b"], np.array([[3, 1], [0, 5]])))
    assert re.findall(r"width:([\d.]+)%", text) == ["100.00", "25.00"]
    assert "one 8.0 40.0 % two 2.0 10.0 %" in parse(text).text
    cells = re.findall(r'class="(hit|miss)" style="--share:(\d+)">(\d)<', text)
    assert cells == [("hit", "75", "3"), ("miss", "25", "1"), ("miss", "0", "0"), ("hit", "100", "5")]


# Templates.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The templates of a package that only this test has."""
    (tmp_path / tmp_path.name / "templates").mkdir(parents=True)
    (tmp_path / tmp_path.name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / tmp_path.name / "templates"
    sys.modules.pop(tmp_path.name, None)


def stars(value):
    return re.sub(r"\S", "*", str(value))


def test_whatever_is_filled_in_is_escaped_once(folder):
    (folder / "a").write_text(
        "{% macro twice(x) %}({{ x }} {{ x }}){% endmacro %}"
        "{% set kept %}<{{ name }}>{% endset %}"
        "{{ name }} {{ twice(name) }} {{ kept }} {{ [name] }} {{ name ~ 1 }}"
    )
    assert fill(folder.parent.name, "a", {"name": "ab"}, stars) == "** (** **) <**> ****** ***"


def test_a_name_without_a_value_is_an_error(folder):
    for number, text in enumerate(("{{ name }}", "{{ given.name }}", "{% for each in name %}{% endfor %}")):
        (folder / str(number)).write_text(text)
        with pytest.raises(DependencyError, match="jinja2 raised UndefinedError") as raised:
            fill(folder.parent.name, str(number), {"given": {}}, str)
        assert isinstance(raised.value.__cause__, jinja2.UndefinedError)


def test_without_jinja2_the_error_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(DependencyError, match=r"`pip install jinja2`, or install tpucache\[report\]"):
        fill(folder.parent.name, "a", {}, str)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_template_of_the_package_leaves_a_value_as_it_is(path):
    text = path.read_text()
    assert "autoescape" not in text
    assert "safe" not in re.sub(r"(?<=\w \| )safe(?= }})|unsafe-inline", "", text)
    assert set(re.findall(r"(\w+) \| safe", text)) <= (CHECKED if path.name == "card.md.jinja" else set())
    if path.suffix == ".html":
        assert not re.search(r"<script|\son\w+=|=[^\"]?{{", text)  # and each value in an attribute is quoted
