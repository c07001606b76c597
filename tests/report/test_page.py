"""The computed parts of pages: values along axes, bars, and the curves of folds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpucache.report.page import Ink, areas_chart, lines_chart, make_bars, ticks
from tpucache.report.text import seconds_text
from tpucache.training.page import fold_inks


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 40, ["0", "10", "20", "30", "40"]),
        (1, 13_000, ["5,000", "10,000"]),
        (0.031, 0.62, ["0.2", "0.4", "0.6"]),
        (1e-5, 3.3e-4, ["0.0001", "0.0002", "0.0003"]),
        (-1.5, 1.5, ["-1", "0", "1"]),
        (2.5, 2.5, ["2.5"]),
    ],
)
def test_an_axis_has_round_values(low, high, texts):
    assert [text for _, text in ticks(low, high, 5)] == texts


finite = st.floats(-1e38, 1e38)


@pytest.mark.slow
@given(finite, finite, st.integers(2, 9))
def test_values_of_any_axis_are_few_and_lie_on_it(one, other, most):
    low, high = sorted((one, other))
    found = [value for value, _ in ticks(low, high, most)]
    assert 1 <= len(found) <= most
    slack = 1e-6 * max(abs(low), abs(high))
    assert all(low - slack <= value <= high + slack for value in found)


def test_curves_lie_on_one_scale_and_reach_over_the_span():
    chart = lines_chart(
        [(Ink("blue"), [(1, 0.0), (5, 1.0)]), (Ink("green"), [(5, math.nan), (9, 0.5)])], "a label", (1, 9)
    )
    (_, first), (_, second) = chart.lines
    assert first.split() == ["0.0,147.0", "320.0,3.0"]
    assert second.split() == ["0.0,75.0", "640.0,75.0"]  # a point alone
    assert [tick.text for tick in chart.across] == ["2", "4", "6", "8"]
    assert [round(tick.place, 1) for tick in chart.across] == [12.5, 37.5, 62.5, 87.5]
    assert chart.up[0] == (98.0, "0.0")


def test_steps_are_whole_numbers():
    chart = lines_chart([(Ink("blue"), [(1, 0.0), (4, 1.0)])], "a label")
    assert [tick.text for tick in chart.across] == ["1", "2", "3", "4"]


def test_a_point_alone_is_a_line_and_none_is_no_chart():
    assert lines_chart([(Ink("blue"), [(3, 0.5)])], "a label").lines[0][1].count(",") == 2
    assert lines_chart([(Ink("blue"), [(3, math.nan)])], "a label") is None


def test_areas_have_the_share_of_their_row_as_their_scale():
    counts = np.zeros((1, 256), np.int64)
    counts[0, 100:110] = 10
    assert [tick.text for tick in areas_chart(counts, ["red"], "a label", []).up][-1] == "10 %"


def test_bars_are_as_long_as_their_share_of_the_largest():
    first, second = make_bars([("one", 8.0), ("two", 2.0)], 8, 20, seconds_text)
    assert first == ("one", "8.0 s", "100.00", "40.0")
    assert second.width == "25.00"


@pytest.mark.parametrize("count", [1, 2, 5, 10, 16])
def test_each_fold_has_a_colour_of_its_own(count):
    inks = fold_inks([str(fold) for fold in range(count)])
    hues = sorted(ink.hue for ink in inks.values())
    assert len(inks) == len(set(hues)) == count
    assert min(np.diff([*hues, hues[0] + 360])) >= 360 // count - 1
    assert len({ink.style for ink in inks.values()}) == (2 if count >= 8 else 1)
