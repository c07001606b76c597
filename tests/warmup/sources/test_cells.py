"""Tables without quotes are split without a parser, with the same result."""

from __future__ import annotations

import csv
import io

from hypothesis import example, given
from hypothesis import strategies as st

from tpucache.warmup.sources.cells import _plain_columns


@given(st.lists(st.text('ab1, "\n\r', max_size=8), max_size=6).map("\n".join))
@example("a,b\r\n1,2\r\n")
@example("a,b\n1,2\n")
@example("\n")
@example("")
def test_a_text_that_needs_no_parser_is_what_the_parser_reads(text: str) -> None:
    columns = _plain_columns(text)
    if columns:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
        assert [list(cells) for cells in zip(*columns, strict=True)] == rows
    elif text.strip("\n") and not set('"\r') & set(text) and "\n\n" not in text and text[0] != "\n":
        assert len({line.count(",") for line in text.removesuffix("\n").split("\n")}) > 1
