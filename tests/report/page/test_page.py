"""The report: one page that says what it should, and nothing that a cache put into it."""

from __future__ import annotations

import ast
import html
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tpucache import TpucacheError, report_cache
from tpucache.redact import printable

#: Every tag of a page, and the attributes that could load or run something.
TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "section",
        "header",
        "footer",
        "div",
        "span",
        "h1",
        "h2",
    ),
    *("p", "dl", "dt", "dd", "ul", "li", "code", "pre", "figure", "figcaption", "img", "details", "summary"),
    *("svg", "g", "rect", "polygon", "table", "thead", "tbody", "tr", "th", "td"),
}
LOADING = {"src", "href", "action", "data", "poster", "srcset", "background", "formaction"}


class Page(HTMLParser):
    """A page as a browser takes it: its tags, its attributes, its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts = set(), [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def code_of(report):
    return html.unescape(re.search(r"<pre><code>(.*?)</code></pre>", report.html, re.S)[1])


@pytest.fixture(scope="module")
def full(tmp_path_factory, plain_cache, hostile):
    """The report of a cache whose every text is hostile."""
    directory = tmp_path_factory.mktemp("full") / hostile.replace("/", "_").replace("\udcff", "")
    return report_cache(
        plain_cache(
            directory,
            paths=[f"{hostile}{number}" for number in range(12)],
            skipped=[(f"{hostile} left out", f"{hostile} is why")] * 3,
            recipe={"size": [20, 24], hostile: hostile, "augmentation": {hostile: [hostile]}},
            source_bytes=range(100, 1300, 100),
        )
    )


def test_hostile_names_are_shown_as_text_and_never_as_markup(full, hostile):
    page = Page(full.html)
    assert page.tags <= TAGS
    assert not {name for name, _ in page.attributes if name.startswith("on")}
    shown = printable(hostile)
    for place in (shown, f"{shown}3", f"{shown} left out", f"{shown} is why"):
        assert place in page.text
    full.html.encode()


def test_nothing_is_loaded_from_elsewhere(full):
    page = Page(full.html)
    assert all(value.startswith("data:image/") for name, value in page.attributes if name in LOADING)
    assert not re.search(r"url\(|@import|https?:", full.html)
    assert ("content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in page.attributes


def test_the_page_tells_all_about_a_cache(full):
    text = Page(full.html).text
    for part in ("12", "36", "Samples", "Classes", "Original sizes", "Channels", "Skipped", "How to use it", "On disk"):
        assert part in text
    assert "all clean records" in text
    assert "v02-00000.lmdb" in text
    assert "ab" * 32 in text
    assert "0.0392" in text  # a mean of 10, of 255
    assert full.html.count("<img ") == 36


@pytest.mark.parametrize("name", ["plain", "drawn", "tokens"])
def test_its_code_runs_unchanged(name, request, monkeypatch):
    cache = request.getfixturevalue(name)
    monkeypatch.chdir(cache.parent)
    exec(code_of(report_cache(cache, 1)), {})


def test_its_code_names_a_folder_of_any_name(full):
    strings = {node.value for node in ast.walk(ast.parse(code_of(full))) if isinstance(node, ast.Constant)}
    assert full.name in strings


def test_what_is_not_known_is_left_out(tokens):
    page = Page(report_cache(tokens).html)
    assert "img" not in page.tags
    for part in ("Samples", "Classes", "Original sizes", "Channels", "Skipped"):
        assert part not in page.text
    assert "a dictionary of tensors: tokens, label" in page.text


@pytest.mark.slow
def test_many_of_anything_are_folded_away(plain_cache, tmp_path):
    names = [f"class {number}" for number in range(60)]
    cache = plain_cache(
        tmp_path / "cache", variants=1, labels=np.arange(12), classes=names, skipped=[("path", "reason")] * 1500
    )
    page = Page(report_cache(cache, 2).html)
    assert "20 more classes" in page.text
    assert "48 without any sample" in page.text
    assert "500 of them are left out here" in page.text
    assert {"details", "summary"} <= page.tags


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(full):
    frame = full._repr_html_()
    found = HTMLParser()
    attributes = {}
    found.handle_starttag = lambda tag, attrs: attributes.update(attrs)
    found.feed(frame)
    assert attributes["srcdoc"] == full.html
    assert "sandbox" in attributes
    assert len(repr(full)) < 300


def test_the_page_is_written_whole_or_the_reason_is_reported(full, tmp_path):
    path = full.save(tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == full.html
    with pytest.raises(TpucacheError, match="cannot be written"):
        full.save(tmp_path / "none" / "report.html")
