"""Progress: bars that fit a terminal, lines of a log, and numbers that people can read."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
import time

import pytest
from patience import PATIENCE

from tpucache.progress import Progress, note
from tpucache.text import duration_text, rate_text

NOTE = "epoch 2 of 12, loss 1.234, 12 min for all folds, waited 0%"


class Terminal(io.StringIO):
    """What a terminal is given, of UTF-8; its width is what `os.get_terminal_size` says."""

    encoding = "utf-8"

    def fileno(self):
        return 1

    def isatty(self):
        return True

    def lines(self):
        """All that was shown, also what was replaced."""
        return [line.rstrip() for line in re.split("[\r\n]", self.getvalue()) if line.strip()]


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("columns", [24, 60, 160])
def test_a_bar_fits_the_terminal(terminal, monkeypatch, columns):
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    with Progress(80_000, "fold 1 (2 of 5)", "images", stream=terminal) as bar:
        for _ in range(4):
            bar.advance(20_000, NOTE)
    assert max(map(len, terminal.lines())) < columns
    shown = terminal.lines()[-1]
    assert shown.startswith("fold 1 (2 of 5): 100%")
    assert ("80,000 of 80,000 images" in shown) == (columns > 24)
    assert (NOTE in shown) == (columns == 160)


def test_a_terminal_that_says_it_has_no_columns_gets_a_bar_of_80(terminal, monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    with Progress(10, "verify", "files", stream=terminal) as shown:
        shown.advance(10)
    assert len(terminal.lines()[-1]) == 79


def test_no_bar_is_drawn_where_a_line_cannot_be_replaced(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with Progress(10, "verify", "files", stream=terminal) as shown:
        shown.advance(10)
    assert terminal.getvalue().startswith("verify: 10 of 10 files, ")
    assert "\r" not in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 1


def test_lines_are_printed_above_a_bar(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(10, "train", "images") as shown:
        shown.advance(5)
        note("epoch 1 {is} over\x1b[2J")
        shown.advance(5)
    assert r"epoch 1 {is} over\x1b[2J" in terminal.lines()
    assert re.fullmatch(r"train: 100% █+ 10 of 10 images, [\d,.]+/s", terminal.lines()[-1])


def test_bytes_are_shown_in_the_unit_of_their_total(capsys, clock):
    with Progress(102_334_464, "verify", "bytes") as shown:
        clock[0] += 0.1455
        shown.advance(102_334_464)
    assert capsys.readouterr().err == "verify: 102 of 102 MB, 703 MB/s\n"


def test_a_log_has_a_line_every_ten_seconds_and_each_count_once(capsys, clock):
    with Progress(400, "warmup", "samples", initial=100) as shown:
        for _ in itertools.repeat(None, 5):
            clock[0] += 6.0
            shown.advance(60, "9 MB")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "warmup: 220 of 400 samples, 10/s, 18 s left, 9 MB",
        "warmup: 340 of 400 samples, 10/s, 6 s left, 9 MB",
        "warmup: 400 of 400 samples, 10/s, 9 MB",
    ]


def test_what_compiled_is_no_part_of_the_rate(capsys, clock):
    with Progress(100, "train", "images") as shown:
        clock[0] += 60.0
        shown.advance(10)
        shown.restart_clock()
        clock[0] += 30.0
        shown.advance(10)
        assert shown.rate == pytest.approx(1 / 3)
    assert capsys.readouterr().err.splitlines()[-1] == "train: 20 of 100 images, 0.3/s, 4 min 00 s left"


def test_where_all_was_done_while_it_compiled_there_is_no_rate(capsys, clock):
    with Progress(10, "train", "images") as shown:
        clock[0] += 60.0
        shown.advance(10, "epoch 1 of 1")
        shown.restart_clock()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["train: 10 of 10 images, 0.2/s, epoch 1 of 1"]
    with Progress(10, "train", "images") as shown:
        shown.advance(10, "epoch 1 of 1")
        shown.restart_clock()
    assert capsys.readouterr().err == "train: 10 of 10 images, epoch 1 of 1\n"


def test_a_late_total_has_a_bar_for_each_stage(capsys):
    with Progress(None, "report") as shown:
        shown.show_stage("hash", 0, 2)
        shown.show_stage("hash", 2, 2)
        shown.show_stage("pairs", 0, 3)
        shown.show_stage("pairs", 3, 3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", ")[0] for line in lines] == ["hash: 2 of 2 samples", "pairs: 3 of 3 samples"]


def test_a_hidden_process_prints_nothing():
    program = "from tpucache.progress import *; hide(); note('a'); p = Progress(1, 'b', 'c'); p.advance(1); p.close()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3600, "1 h 00 min"),
        (7530, "2 h 05 min"),
    ],
)
def test_durations_have_two_units_at_most(seconds, text):
    assert duration_text(seconds) == text


def test_only_small_rates_have_a_decimal():
    assert [rate_text(value) for value in (0, 0.31, 9.96, 1234.5)] == ["0", "0.3", "10", "1,234"]
