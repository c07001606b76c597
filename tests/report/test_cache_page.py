"""The page of a cache says what it should and nothing that the cache put into it, and counts for its charts rightly."""

from __future__ import annotations

import ast
import html
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache import Recipe, TpucacheError, build_cache, report_cache
from tpucache.publish.transfer import fetch_cache
from tpucache.redact import printable
from tpucache.report import cache_page
from tpucache.report.cache_page import channel_histogram, size_histogram
from tpucache.report.records import Records


def code_of(page):
    return html.unescape(re.search(r"<pre><code>(.*?)</code></pre>", page.html, re.S)[1])


@pytest.fixture(scope="module")
def full(tmp_path_factory, plain_cache, hostile):
    """The page of a cache whose every text is hostile."""
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


def test_hostile_names_are_shown_as_text_and_never_as_markup(full, hostile, parse):
    page = parse(full.html)
    assert not page.foreign_tags
    assert not page.scripts
    shown = printable(hostile)
    for place in (shown, f"{shown}3", f"{shown} left out", f"{shown} is why"):
        assert place in page.text
    full.html.encode()


def test_nothing_is_loaded_from_elsewhere(full, parse):
    page = parse(full.html)
    assert page.loaded == []
    assert not re.search(r"url\(|@import|https?:", full.html)
    assert ("content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'") in page.attributes


def test_the_page_tells_all_about_a_cache(full, parse):
    text = parse(full.html).text
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


def test_the_code_runs_for_a_copy_without_the_upper_frequencies(tmp_path, monkeypatch):
    items = [(np.full((32, 32, 3), number, np.uint8), number % 2) for number in range(20)]
    build_cache(items, tmp_path / "whole", Recipe(size=32, codec="dct-zstd", bands=(4, 8)), jobs=1)
    fetch_cache((tmp_path / "whole").as_uri(), tmp_path / "half", resolution=16)
    monkeypatch.chdir(tmp_path)
    code = code_of(report_cache(tmp_path / "half", 1))
    assert 'CachedDataset("half", resolution=16)' in code
    assert "uint8 (20, 3, 16, 16)" in code
    exec(code, {})


def test_its_code_names_a_folder_of_any_name(full):
    strings = {node.value for node in ast.walk(ast.parse(code_of(full))) if isinstance(node, ast.Constant)}
    assert full.name in strings


def test_what_is_not_known_is_left_out(tokens, parse):
    page = parse(report_cache(tokens).html)
    assert "img" not in page.tags
    for part in ("Samples", "Classes", "Original sizes", "Channels", "Skipped"):
        assert part not in page.text
    assert "a dictionary of tensors: tokens, label" in page.text
    for setting in ("fit", "augment", "max_boxes", "mask_values"):  # of images alone
        assert f">{setting}<" not in report_cache(tokens).html
    assert "int64" in page.text or "int32" in page.text


@pytest.mark.slow
def test_many_of_anything_are_folded_away(plain_cache, tmp_path, parse):
    names = [f"class {number}" for number in range(60)]
    cache = plain_cache(
        tmp_path / "cache", variants=1, labels=np.arange(12), classes=names, skipped=[("path", "reason")] * 1500
    )
    page = parse(report_cache(cache, 2).html)
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


def test_channels_are_counted_over_all_clean_records_of_a_small_cache(plain):
    records = Records(plain)
    found = channel_histogram(records)
    pixels = np.stack([records.read(position, 0)["image"] for position in range(12)])
    expected = [np.bincount(pixels[..., channel].reshape(-1), minlength=256) for channel in range(3)]
    assert found.records == 12
    assert np.array_equal(found.counts, expected)


def test_no_more_records_are_read_than_the_bound(plain, monkeypatch):
    monkeypatch.setattr(cache_page, "_RECORDS", 5)
    found = channel_histogram(Records(plain))
    assert found.records == 5
    assert found.counts.sum() == 5 * 20 * 24 * 3


def test_without_an_image_there_are_no_channels(tokens):
    assert channel_histogram(Records(tokens)) is None


@pytest.mark.slow
@given(st.lists(st.integers(1, 1 << 62), min_size=1, max_size=50), st.integers(0, 3))
def test_every_file_whose_size_is_known_is_counted_once(sizes, unknown):
    found = size_histogram(np.array([*sizes, *[0] * unknown], np.uint64))
    assert found.counts.sum() == len(sizes)
    assert found.smallest == pytest.approx(min(sizes))
    assert found.largest == pytest.approx(max(sizes))
    assert found.smallest <= found.middle <= found.largest


def test_steps_of_sizes_are_of_equal_ratio():
    found = size_histogram(np.array([1000, 1001, 31_622, 31_700, 1_000_000]))
    steps = len(found.counts)
    assert found.counts[0] == 2
    assert found.counts[steps // 2 - 1 : steps // 2 + 1].sum() == 2
    assert found.counts[-1] == 1
    assert found.median == 31_622


def test_without_known_sizes_there_is_no_histogram():
    assert size_histogram(np.zeros(4, np.uint64)) is None
