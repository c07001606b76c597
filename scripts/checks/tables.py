"""Random tables with hostile names and values, as a .csv and as parquet, against what pandas reads of them.

    python -m scripts.checks sources --damages 0 --tables 10000 --seed 3

A table has a column of paths, one of labels of some kind, and columns that are kept. Cells, classes, labels and kept
columns are compared. Where we read a table otherwise than pandas does by itself, the reason is listed, and we must read
it as pandas does when it is told so.
"""

from __future__ import annotations

import csv
import io
import math
import random
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tpucache.errors import SourceError
from tpucache.warmup.sources import TableOptions, label_source, open_source
from tpucache.warmup.sources.labels import MOST_CLASSES
from tpucache.warmup.sources.source import Label, column_names
from tpucache.warmup.sources.table import read_table

#: What names and cells may be that programs take for something else.
ODD: Final = (
    "path", "label", "class", "sample", "Path", "index", "=1+1", "'=1", "@a", "-", "+", "--", "a,b", 'a"b', "a\nb",
    "a\r\nb", "a\rb", "\ta", " a", "a ", "  ", "a;b", "a|b", "007", "00", "0x1", "1_0", "1,5", "1e3", "1E400",
    "inf", "-inf", "Infinity", "nan", "NaN", "NA", "N/A", "null", "None", "<NA>", "#N/A", "True", "false", "+7",
    "-0", "7.", ".5", "1e-400", "café", "日本", "\u0663", "\u0968", "½", "²", "\ufeffa", "\x1fa", "\u2028", "\u200b",
    "\xa0", "\x85", "🜁", "{0..9}", "[ab]", "*", "a/b", "../a", "a\\b", "bytes:a", "class:path", "name:a",
    "x" * 200, "9007199254740993", "18446744073709551616",
)  # fmt: skip


class Table(NamedTuple):
    """Rows of cells below their heading; the first column has paths and the second labels."""

    heading: list[str]
    rows: list[list[str]]
    data: bytes


class Meaning(NamedTuple):
    """Classes, and the label of each row."""

    classes: tuple[str, ...]
    labels: list[Label]


def odd_text(draw: random.Random) -> str:
    """Return a text that is not empty: of `ODD`, or of random characters."""
    if draw.random() < 0.6:
        return draw.choice(ODD)
    characters = [chr(draw.choice((draw.randrange(1, 0x250), draw.randrange(0x2000, 0x3000)))) for _ in range(4)]
    return "".join(characters[: draw.randint(1, 4)])


def label_cells(draw: random.Random, rows: int) -> list[str]:
    """Return labels of one kind, of which some may be missing."""
    kinds: list[Callable[[], str]] = [
        lambda: draw.choice(("ant", "bee", "cat")),
        lambda: odd_text(draw),
        lambda: str(draw.randrange(-1, 4)),
        lambda: str(draw.randrange(0, 12)),
        lambda: str(draw.choice((3, 5, 1000, 10**12, -(10**6)))),
        lambda: f"{draw.randrange(3):03}",
        lambda: f"{draw.randrange(4)}.0",
        lambda: repr(draw.uniform(-1e6, 1e6)),
        lambda: repr(1.7e9 + draw.randrange(1000) / 8),
        lambda: f"{draw.random():.3e}",
        lambda: draw.choice(("True", "False")),
        lambda: draw.choice((str(draw.randrange(5)), f"{draw.randrange(5)}.0", f"+{draw.randrange(5)}")),
        lambda: draw.choice((str(draw.randrange(5)), draw.choice(ODD))),
    ]
    kind, missing = draw.choice(kinds), draw.choice(("", "", "NA", "nan", "None", "-1"))
    share = draw.choice((0, 0, 0.2))
    return [missing if draw.random() < share else kind() for _ in range(rows)]


def random_table(draw: random.Random) -> Table:
    """Return a table of a few rows, written in one of the ways that programs write a .csv."""
    rows, columns = draw.randint(1, 12), draw.randint(0, 4)
    heading = list(dict.fromkeys(["path", "y", *(odd_text(draw) for _ in range(columns))]))
    paths = [f"{odd_text(draw)}{number}.png" for number in range(rows)]
    cells = [paths, label_cells(draw, rows), *(label_cells(draw, rows) for _ in heading[2:])]
    body = [list(row) for row in zip(*cells, strict=True)]
    end = draw.choice(("\n", "\r\n"))
    data = written(heading, body, end, is_quoted=draw.random() < 0.5)
    data = data if draw.random() < 0.8 else data.removesuffix(end.encode())
    return Table(heading, body, draw.choice((b"", b"", b"\xef\xbb\xbf")) + data)


def written(
    heading: Sequence[str], rows: Sequence[Sequence[str]], end: str = "\r\n", *, is_quoted: bool = False
) -> bytes:
    """Return a .csv. All cells are quoted where one has a carriage return, which some releases of Python leave bare."""
    text = io.StringIO(newline="")
    is_quoted |= any("\r" in cell for row in (heading, *rows) for cell in row)
    csv.writer(text, quoting=csv.QUOTE_ALL if is_quoted else csv.QUOTE_MINIMAL, lineterminator=end).writerows(
        [heading, *rows]
    )
    return text.getvalue().encode()


def read_by_pandas(data: bytes, **options: Any) -> Any:
    """Return a .csv as pandas reads it."""
    import pandas

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # releases from 3.1 on have one precision, and warn where it is asked for
        return pandas.read_csv(
            io.BytesIO(data), encoding="utf-8-sig", float_precision="round_trip", index_col=False, **options
        )


def meaning_of(series: Any) -> Meaning:
    """Return what a column of pandas is as labels: its values in their order are classes, other numbers are values."""
    import pandas
    from pandas.api import types

    known = series.dropna()
    if types.is_bool_dtype(series) or not types.is_numeric_dtype(series):
        names = sorted(map(str, known.unique()))
        return Meaning(tuple(names), [None if pandas.isna(value) else names.index(str(value)) for value in series])
    values = [value for value in known.tolist() if math.isfinite(value)] or known.tolist()
    if not all(float(value).is_integer() for value in values):
        return Meaning((), [None if pandas.isna(value) else (float(value),) for value in series])
    classes = sorted({int(value) for value in values})
    if classes[:2] == [-1, 0]:
        classes = classes[1:]
    places = {value: place for place, value in enumerate(classes)}
    return Meaning(tuple(map(str, classes)), [None if pandas.isna(value) else places.get(value) for value in series])


_TEXT: Final = {"dtype": str, "keep_default_na": False, "na_values": [""]}
_PADDED: Final = re.compile(r"\s*[+-]?0\d")


_WORDS: Final = re.compile(r"\s*(-?nan|n/?a|null|none|#n/?a|<na>|1\.#qnan|-1\.#ind|#n/a n/a)\s*", re.IGNORECASE)


class Reason(NamedTuple):
    """Why we read cells otherwise than pandas does by itself, and how pandas is told to read them as we do.

    One of the cells matches `cells`. With `blanks` pandas is told that white space alone is missing.
    """

    text: str
    cells: re.Pattern[str]
    options: Mapping[str, Any]
    blanks: bool = False


#: In which order they are tried; the first that gives our reading is the reason.
REASONS: Final = (
    Reason("007 is a name, and so is each label beside it", _PADDED, {"dtype": str}),
    Reason("NA, None and such beside names are a class, of which a warning tells", _WORDS, _TEXT),
    Reason("white space alone is no label", re.compile(r"\s+"), {}, blanks=True),
    Reason("NA, None and such beside names are a class, and white space alone is no label", _WORDS, _TEXT, blanks=True),
)


def expected_meanings(table: Table) -> list[tuple[str, Meaning]]:
    """Return what the labels of a table may be: as pandas reads them by itself, and for each reason otherwise."""
    found = [("", meaning_of(read_by_pandas(table.data)["y"]))]
    for reason in REASONS:
        if not any(reason.cells.match(row[1]) for row in table.rows):
            continue
        blank = sorted({row[1] for row in table.rows if not row[1].strip()}) if reason.blanks else []
        options = {**reason.options, "na_values": [*reason.options.get("na_values", []), *blank]}
        found.append((reason.text, meaning_of(read_by_pandas(table.data, **options)["y"])))
    return found


def read_by_us(path: Path) -> tuple[Meaning, list[str], dict[str, Any]] | None:
    """Return labels, paths and kept columns of a table, None where it is refused for want of labels."""
    try:
        listing = label_source(open_source(path, TableOptions(label_cols=("y",))), "auto").list()
    except SourceError as error:
        if "no label in any row" in str(error) or "leave the cell empty" in str(error):
            return None
        raise
    labels = [None if sample.fault else sample.label for sample in listing.samples]
    return Meaning(listing.classes, labels), [sample.path for sample in listing.samples], dict(listing.columns)


def differences(table: Table, folder: Path) -> Counter[str]:
    """Return what of a table is read otherwise than by pandas, with the reason where one is known."""
    found: Counter[str] = Counter()
    path = folder / "table.csv"
    path.write_bytes(table.data)
    plain = read_by_pandas(table.data, dtype=str, na_filter=False)
    cells = read_table(path)
    if cells.names != list(plain.columns) or any(cells.column(name) != plain[name].tolist() for name in cells.names):
        found["DIFFERS: cells"] += 1
    if [row[1] for row in table.rows] != plain["y"].tolist():
        found["DIFFERS: cells as pandas reads them, from what was written"] += 1
    read = read_by_us(path)
    meanings = expected_meanings(table)
    if read is None:
        if any(label is not None and all(map(math.isfinite, _numbers(label))) for label in meanings[0][1].labels):
            found["DIFFERS: refused"] += 1
        return found
    meaning, paths, columns = read
    reason = next((text for text, other in meanings if is_same(meaning, other)), None)
    if reason is None:
        found[f"DIFFERS: labels {[row[1] for row in table.rows]} -> {meaning}, by pandas {meanings[0][1]}"] += 1
    elif reason:
        found[f"listed: {reason}"] += 1
    if paths != plain["path"].tolist():
        found["DIFFERS: paths"] += 1
    found += _column_differences(table, columns)
    found += _parquet_differences(table, meaning, folder)
    return found


def is_same(ours: Meaning, theirs: Meaning) -> bool:
    """Return whether labels are the same; one that is not finite is a fault of its sample here."""
    labels = [label if label is None or all(map(math.isfinite, _numbers(label))) else None for label in theirs.labels]
    return ours == Meaning(theirs.classes, labels)


def _numbers(label: Label) -> Sequence[float]:
    return label if isinstance(label, tuple) else ()


def _column_differences(table: Table, columns: Mapping[str, Any]) -> Counter[str]:
    """Return which kept columns are neither the numbers that pandas reads nor the text as it is."""
    found: Counter[str] = Counter()
    frame, plain = read_by_pandas(table.data), read_by_pandas(table.data, dtype=str, na_filter=False)
    for name, safe in column_names(table.heading[2:]).items():
        if isinstance(columns[safe], np.ndarray):
            is_right = np.array_equal(columns[safe], frame[name], equal_nan=True)
        else:
            is_right = list(columns[safe]) == plain[name].tolist()
        if not is_right:
            found[f"DIFFERS: the column {plain[name].tolist()}"] += 1
    return found


def _parquet_differences(table: Table, meaning: Meaning, folder: Path) -> Counter[str]:
    """Return whether labels mean something else as parquet than as a .csv, but that whole numbers are class numbers."""
    from pandas.api import types

    frame = read_by_pandas(table.data, **{**_TEXT, "dtype": None})
    if types.is_bool_dtype(frame["y"]) or any(_PADDED.match(row[1]) for row in table.rows):
        return Counter()  # what pandas makes of these words, and of 007, is not what the .csv has
    frame.to_parquet(folder / "table.parquet", index=False)
    read = read_by_us(folder / "table.parquet")
    if types.is_integer_dtype(frame["y"]):
        numbers = [value if 0 <= value < MOST_CLASSES else None for value in frame["y"].tolist()]
        meaning = Meaning((), numbers)
    elif not types.is_numeric_dtype(frame["y"]):
        frame["y"] = read_by_pandas(table.data, **_TEXT)["y"]
        frame.to_parquet(folder / "table.parquet", index=False)
        read = read_by_us(folder / "table.parquet")
    if read is None or read[0] == meaning:
        return Counter()
    return Counter({f"DIFFERS: parquet {frame['y'].tolist()} -> {read[0]}, as a .csv {meaning}": 1})


def print_differences(tables: int, seed: int) -> int:
    """Print what of random tables is read otherwise than by pandas; return how often no reason is known."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(tables):
            found += differences(random_table(random.Random(f"{seed} {number}")), Path(folder))
    for what, count in sorted(found.items()):
        print(f"    {count} {what}")
    unlisted = sum(count for what, count in found.items() if what.startswith("DIFFERS"))
    print(f"{tables} tables: {unlisted} differences from pandas without a reason")
    return unlisted
