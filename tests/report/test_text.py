"""Names of anything, as text that people can read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.redact import printable
from tpucache.report.text import ELLIPSIS, cut, describe_label, describe_mask, outline, seconds_text
from tpucache.units import size_text

CLASSES = ("ant", "bee", "cat")
ANY_TEXT = st.text(st.characters(codec=None))


@pytest.mark.slow
@given(ANY_TEXT)
def test_text_of_any_characters_becomes_one_line_that_prints(text):
    shown = printable(text)
    assert shown.isprintable()
    shown.encode()  # no surrogates are left
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_line_ends_and_reversals_are_shown_as_escapes():
    assert printable("a\nb\u202ec\udcff") == r"a\nb\u202ec\udcff"


@pytest.mark.slow
@given(st.text("ab c", max_size=30), st.integers(1, 35), st.booleans())
def test_text_is_cut_to_the_longest_part_that_fits(text, most, keep_end):
    shown = cut(text, lambda part: len(part) <= most, keep_end=keep_end)
    assert len(shown) <= most
    if len(text) <= most:
        assert shown == text
    elif keep_end:
        assert shown == ELLIPSIS + text[len(text) - most + 1 :]
    else:
        assert shown == text[: most - 1].rstrip() + ELLIPSIS


def test_only_the_ellipsis_is_left_where_nothing_fits():
    assert cut("abc", lambda part: False) == ELLIPSIS


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (None, "unlabelled"),
        (np.array(1), "bee"),
        (np.array(7), "7"),
        (np.array(-1), "-1"),
        (np.array(1.5), "1.5"),
        (np.array([1.0, 0, 1], np.float32), "ant, cat"),
        (np.array([0, 0.25, 0], np.float32), "bee 0.25"),
        (np.zeros(3, np.float32), "none of the classes"),
        (np.array([0.5, -3]), "0.5, -3"),
    ],
)
def test_a_label_is_shown_by_the_names_of_its_classes_or_its_values(label, text):
    assert describe_label(label, CLASSES) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 kB"), (4.9e8, "490.0 MB")])
def test_sizes_are_shown_in_the_unit_that_fits(count, text):
    assert size_text(count) == text


def test_nested_values_are_outlined_with_plain_lists_in_one_line():
    value = {"p": 1.0, "steps": [{"name": "flip", "size": [8, 8]}, [[1, 2], []]], "none": {}, "text": "\u65e5"}
    assert outline(value) == [
        "p: 1.0",
        "steps:",
        "  -",
        '    name: "flip"',
        "    size: [8, 8]",
        "  -",
        "    - [1, 2]",
        "    - []",
        "none: {}",
        'text: "\u65e5"',
    ]


def test_a_mask_is_its_classes_but_the_background_the_largest_first():
    mask = np.array([[0, 0, 2, 2], [2, 1, 7, 7]], np.uint8)[..., None]
    assert describe_mask(mask, CLASSES) == "cat 37.5%, class 7 25.0%, bee 12.5%"
    assert describe_mask(np.arange(8, dtype=np.uint8), ()).endswith("class 4 12.5% and 3 more")
    assert describe_mask(np.zeros((2, 2), np.uint8), CLASSES) == "nothing"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.44, "9.4 s"),
        (59.4, "59 s"),
        (200.2, "3 min 20 s"),
        (3599.9, "1 h 00 min"),
        (9000, "2 h 30 min"),
    ],
)
def test_durations_have_as_many_digits_as_matter(seconds, text):
    assert seconds_text(seconds) == text
