"""The table of docs/labels.md: what each form of label means from each source, compared with what is read.

    PYTHONPATH=tests python tests/warmup/sources/test_label_table.py

writes the table anew.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from made import png, tar_of, write_records
from PIL import Image

from tpucache.errors import SampleError, SourceError
from tpucache.warmup.build_options import LabelKind
from tpucache.warmup.sources import TableOptions, box_source, label_source, open_source, to_source
from tpucache.warmup.sources.source import Source

PAGE: Final = Path(__file__).parents[3] / "docs" / "labels.md"
NO_CELL: Final = "cannot hold it"


class Form(NamedTuple):
    """Labels of some samples, their type for Hugging Face, and what they mean: classes and labels."""

    values: list[Any]
    feature: Callable[[Any], Any]
    classes: tuple[str, ...]
    labels: list[Any]


_SEVERAL: Final = [[1, 0], [1, 1], [0, 1], [0, 1]]
FORMS: Final[Mapping[str, Form]] = {
    "names of classes": Form(
        ["bee", "ant", "bee", "cat"], lambda hub: hub.Value("string"), ("ant", "bee", "cat"), [1, 0, 1, 2]
    ),
    "names of all digits, `007`": Form(
        ["007", "010", "007", "008"], lambda hub: hub.Value("string"), ("007", "008", "010"), [0, 2, 0, 1]
    ),
    "text of numbers": Form(["10", "9", "10", "9"], lambda hub: hub.Value("string"), ("9", "10"), [1, 0, 1, 0]),
    "numbers of classes": Form([0, 2, 1, 1], lambda hub: hub.Value("int64"), ("0", "1", "2"), [0, 2, 1, 1]),
    "numbers with gaps, 3 and 5": Form([3, 5, 5, 3], lambda hub: hub.Value("int64"), tuple("012345"), [3, 5, 5, 3]),
    "`ClassLabel`": Form([0, 1, 1, 0], lambda hub: hub.ClassLabel(names=["ant", "bee"]), ("ant", "bee"), [0, 1, 1, 0]),
    "whole floats": Form([0.0, 1.0, 1.0, 0.0], lambda hub: hub.Value("float32"), ("0", "1"), [0, 1, 1, 0]),
    "other floats": Form([0.5, 1.0, 2.0, 3.0], lambda hub: hub.Value("float64"), (), [[0.5], [1.0], [2.0], [3.0]]),
    "lists of names": Form(
        [["a"], ["a", "b"], ["b"], ["b"]], lambda hub: hub.Sequence(hub.Value("string")), ("a", "b"), _SEVERAL
    ),
    "lists of `ClassLabel`": Form(
        [[0], [0, 1], [1], [1]], lambda hub: hub.Sequence(hub.ClassLabel(names=["a", "b"])), ("a", "b"), _SEVERAL
    ),
    "lists of numbers of classes": Form(
        [[0], [0, 1], [1], [1]], lambda hub: hub.Sequence(hub.Value("int64")), ("0", "1"), _SEVERAL
    ),
    "a 0 or 1 for each class": Form(_SEVERAL, lambda hub: hub.Sequence(hub.Value("int64")), ("0", "1"), _SEVERAL),
    "several values": Form(
        [[0.5, 2.0], [1.5, 3.0], [0.25, 1.0], [2.0, 0.5]],
        lambda hub: hub.Sequence(hub.Value("float64")),
        (),
        [[0.5, 2.0], [1.5, 3.0], [0.25, 1.0], [2.0, 0.5]],
    ),
    "-1 among class numbers": Form([0, -1, 1, 0], lambda hub: hub.Value("int64"), ("0", "1"), [0, None, 1, 0]),
}
#: Where samples have the same names of classes, and classes other numbers, by source and form: in words, and as classes
#: and labels.
SAME_NAMES: Final[Mapping[tuple[str, str], tuple[str, tuple[str, ...], list[Any]]]] = {
    ("folder", "text of numbers"): (
        "same names; `10` comes before `9`, as in torchvision, unless `--classes` says otherwise",
        ("10", "9"),
        [0, 1, 0, 1],
    ),
    ("`.csv`", "numbers with gaps, 3 and 5"): (
        "same names; the two classes `3` and `5` alone, unless `--classes` says otherwise",
        ("3", "5"),
        [0, 1, 1, 0],
    ),
}
_NAMED: Final = ("`ClassLabel`", "lists of `ClassLabel`")


def _folder(name: str, form: Form, folder: Path) -> tuple[Any, str] | None:
    if not all(isinstance(value, str) for value in form.values):
        return None
    for number, value in enumerate(form.values):
        (folder / value).mkdir(exist_ok=True)
        (folder / value / f"{number}.png").write_bytes(png(number))
    return open_source(folder), ""


def _table(name: str, form: Form, folder: Path) -> tuple[Any, str] | None:
    if name in _NAMED:
        return None
    lists = isinstance(form.values[0], list)
    several = lists and len({len(value) for value in form.values}) == 1
    columns = [str(number) for number in range(len(form.values[0]))] if several else ["label"]
    with (folder / "table.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", *columns])
        for number, value in enumerate(form.values):
            (folder / f"{number}.png").write_bytes(png(number))
            rows.writerow([f"{number}.png", *(value if several else [" ".join(map(str, value)) if lists else value])])
    options = TableOptions(label_cols=tuple(columns), label_sep=" " if lists and not several else None)
    told = "several `--label-col`" if several else "`--label-sep`" if lists else ""
    return open_source(folder / "table.csv", options), told


def _tar(name: str, form: Form, folder: Path) -> tuple[Any, str] | None:
    if name in _NAMED:
        return None
    lists = isinstance(form.values[0], list) or name == "text of numbers"  # which a .cls holds as numbers
    files = {f"{number}.png": png(number) for number in range(len(form.values))}
    for number, value in enumerate(form.values):
        label = json.dumps({"label": value}) if lists else str(value)
        files[f"{number}.{'json' if lists else 'cls'}"] = label.encode()
    (folder / "photos.tar").write_bytes(tar_of(files))
    options = TableOptions(label_cols=("label",)) if lists else None
    return open_source(folder / "photos.tar", options), "in `.json`, `--label-col label`" if lists else ""


def _records(name: str, form: Form, folder: Path) -> tuple[Any, str] | None:
    if name in _NAMED:
        return None
    examples = []
    for number, value in enumerate(form.values):
        texts = [
            text.encode() if isinstance(text, str) else text for text in (value if isinstance(value, list) else [value])
        ]
        examples.append({"image": png(number), "label": texts})
    return open_source(write_records(folder / "a.tfrec", *examples)), ""


class _Items:
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"image": np.full((2, 2, 3), number, np.uint8), "label": self.values[number]}


def _python(name: str, form: Form, folder: Path) -> tuple[Any, str] | None:
    return None if name in _NAMED else (to_source(_Items(form.values)), "")


def _rows(form: Form) -> Any:
    hub = pytest.importorskip("datasets")
    images = [Image.new("RGB", (2, 2), (number, 0, 0)) for number in range(len(form.values))]
    features = hub.Features({"image": hub.Image(), "label": form.feature(hub)})
    return hub.Dataset.from_dict({"image": images, "label": form.values}, features=features)


def _object(name: str, form: Form, folder: Path) -> tuple[Any, str] | None:
    return to_source(_rows(form)), ""


def _saved(name: str, form: Form, folder: Path) -> tuple[Any, str] | None:
    _rows(form).save_to_disk(str(folder / "saved"))
    return open_source(folder / "saved"), ""


def _parquet(name: str, form: Form, folder: Path) -> tuple[Any, str] | None:
    _rows(form).to_parquet(str(folder / "rows.parquet"))
    return open_source(folder / "rows.parquet"), ""


def _coco(name: str, form: Form, folder: Path) -> tuple[Any, str] | None:
    """Return images with a box each; a category's id is not its place, and there are gaps."""
    if not all(isinstance(value, str) for value in form.values):
        return None
    ids = {value: 3 * place + 5 for place, value in enumerate(form.classes)}
    for number in range(len(form.values)):
        (folder / f"{number}.png").write_bytes(png(number))
    content = {
        "images": [{"id": number, "file_name": f"{number}.png"} for number in range(len(form.values))],
        "annotations": [
            {"id": number, "image_id": number, "category_id": ids[value], "bbox": [0, 0, 1, 1]}
            for number, value in enumerate(form.values)
        ],
        "categories": [{"id": key, "name": value} for value, key in ids.items()],
    }
    (folder / "boxes.json").write_text(json.dumps(content))
    return box_source(open_source(folder), folder / "boxes.json"), "of boxes, in the order of their ids"


#: hf:// reads the parquet files of a data set, with the same code as a local one.
SOURCES: Final[Mapping[str, Callable[[str, Form, Path], tuple[Any, str] | None]]] = {
    "folder": _folder,
    "`.csv`": _table,
    "parquet, `hf://`": _parquet,
    "TFRecord": _records,
    "tar (WebDataset)": _tar,
    "COCO boxes": _coco,
    "Python": _python,
    "HF object": _object,
    "HF folder": _saved,
}


def _read(source: Source, kind: LabelKind, is_boxes: bool) -> tuple[tuple[str, ...], list[Any]]:
    """Return the classes and labels; None is that of a sample without one, which a build refuses or skips."""
    labelled = label_source(source, kind)
    listing = labelled.list()
    samples = sorted(listing.samples, key=lambda sample: PurePosixPath(sample.path).stem)  # a folder's: by their files
    if is_boxes:
        rows = [labelled.load(sample).fields["boxes"] for sample in samples]
        return listing.classes, [int(row[0, 4]) for row in rows]
    labels: list[Any] = []
    is_listed = any(sample.label is not None for sample in samples)
    for sample in samples:
        try:
            labels.append(sample.label if is_listed else labelled.load(sample).label)
        except SampleError as error:
            if "means no label" not in str(error):
                raise
            labels.append(None)
    labels = [list(label) if isinstance(label, tuple) else label for label in labels]
    numbers = [label for label in labels if isinstance(label, int)]
    return listing.classes or tuple(map(str, range(max(numbers, default=-1) + 1))), labels


def cell(source: str, name: str, folder: Path) -> str:
    """Return what a form means from a source: the same as from the others, or refused with the option to give."""
    form = FORMS[name]
    made = SOURCES[source](name, form, folder)
    if made is None:
        return NO_CELL
    opened, told = made
    option, refused = "", ""
    try:
        found = _read(opened, "auto", source == "COCO boxes")
    except (SourceError, SampleError) as error:
        option, refused = "--labels multilabel", str(error)
        found = _read(opened, "multilabel", is_boxes=False)
    assert option in refused, (source, name, refused)
    if (source, name) in SAME_NAMES:
        words, *other = SAME_NAMES[source, name]
        assert found == tuple(other), (source, name, found)
        return words
    assert found == (form.classes, form.labels), (source, name, found)
    told = f", {told}" if told else ""
    return f"refused: give `{option}`{told}" if option else f"same{told}"


def table(folder: Path) -> str:
    """Return the table as Markdown."""
    lines = ["| | " + " | ".join(SOURCES) + " |", "|---" * (len(SOURCES) + 1) + "|"]
    for row, name in enumerate(FORMS):
        cells = []
        for column, source in enumerate(SOURCES):
            own = folder / f"{row}-{column}"
            own.mkdir()
            cells.append(cell(source, name, own))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


_PLACE: Final = re.compile(r"(?<=<!-- forms -->\n).*?(?=\n<!-- /forms -->)", re.DOTALL)


def test_each_form_of_label_means_the_same_from_each_source_or_is_refused_with_the_option(tmp_path: Path) -> None:
    found = _PLACE.search(PAGE.read_text())
    assert found is not None
    assert found[0] == table(tmp_path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        made = table(Path(here))
    PAGE.write_text(_PLACE.sub(lambda _: made, PAGE.read_text()))
    sys.stdout.write(f"{made}\n")
