"""What is run again on a finished cache has the labels, folds and columns of that cache, or is refused."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from made import build_here, digests, labelled, write_photos, write_rows

from tpucache.errors import SourceError, TpucacheError
from tpucache.report.inspect import describe, describe_lines
from tpucache.store.cache import Cache
from tpucache.store.manifest import Manifest
from tpucache.warmup.repair import repair_cache
from tpucache.warmup.sources import TableOptions, TableSource
from tpucache.warmup.sources.source import Label


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = write_photos(tmp_path / "photos", 6, classes=(), size=(20, 16))
    (root / "table.csv").write_text(
        "path,kind,age,fold,split,note\n"
        "0000.jpg,cat,31,0,1,a\n0001.jpg,dog,7,1,0,b\n0002.jpg,cat,64,2,1,007\n"
        "0003.jpg,dog,7,0,0,d\n0004.jpg,emu,31,1,1,e\n0005.jpg,cat,99,2,0,f\n"
    )
    return root


def table(folder: Path, *labels: str, fold: str | None = "fold", **options: Any) -> TableSource:
    return TableSource(folder / "table.csv", TableOptions(label_cols=labels, fold_col=fold, **options))


_OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another label column": ({"labels": ("age",)}, "another label"),
    "no label column": ({"labels": ()}, "another label: '0000.jpg': cat before and .has no label"),
    "labels where there were none": (
        {"made": (), "labels": ("kind",)},
        "another label: '0000.jpg': .none. before and cat now",
    ),
    "another fold column": ({"labels": ("kind",), "fold": "split"}, "another value in column 'fold'"),
    "no fold column": ({"labels": ("kind",), "fold": None}, "column 'fold"),
    "a mask column": (
        {"labels": ("kind",), "mask_col": "note"},
        "column 'note': '0000.jpg': a before and .none. now",
    ),
    "several labels": ({"labels": ("age", "split")}, "another label"),
    "a separator": ({"labels": ("kind",), "label_sep": "|"}, "another label"),
}


@pytest.mark.parametrize(("options", "reason"), _OTHERS.values(), ids=_OTHERS)
def test_other_columns_on_a_finished_cache_are_refused(
    folder: Path, tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    cache, made, labels = tmp_path / "cache", options.pop("made", ("kind",)), options.pop("labels")
    build_here(table(folder, *made), cache)
    before = digests(cache)
    with pytest.raises(SourceError, match=rf"{reason}.*another folder"):
        build_here(table(folder, *labels, **options), cache)
    build_here(table(folder, *made), cache)
    assert digests(cache) == before


_EDITS = {
    "labels at equal count": ("0000.jpg,cat", "0000.jpg,dog", "another label"),
    "a fold": ("cat,31,0,1", "cat,31,5,1", "column 'fold'.*'0000.jpg': 0 before and 5 now"),
    "a kept column": ("1,a\n", "1,z\n", "column 'note'.*a before and z now"),
    "a number of a kept column": ("64,2,1,007", "64,2,1,7", "column 'note'.*007 before and 7 now"),
    "a column's name": ("split", "part", "column 'part': '0000.jpg': .none. before and 1 now"),
    "two rows that change places": (
        "0000.jpg,cat,31,0,1,a\n0001.jpg,dog,7,1,0,b",
        "0000.jpg,dog,31,0,1,a\n0001.jpg,cat,7,1,0,b",
        "2 samples have another label",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "reason"), _EDITS.values(), ids=_EDITS)
@pytest.mark.parametrize("adds", [False, True], ids=["finished", "added to"])
def test_a_table_that_was_edited_is_refused(
    folder: Path, tmp_path: Path, old: str, new: str, reason: str, adds: bool
) -> None:
    build_here(table(folder, "kind"), tmp_path / "cache")
    path = folder / "table.csv"
    path.write_text(path.read_text().replace(old, new) + ("0005.jpg,cat,4,1,0,x\n" if adds else ""))
    with pytest.raises(SourceError, match=reason):
        build_here(table(folder, "kind"), tmp_path / "cache")


@pytest.mark.slow
def test_a_table_in_another_order_and_with_rows_added_is_the_same(folder: Path, tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", folder / "table.csv"
    manifest = build_here(table(folder, "kind"), cache)
    head, *rows = path.read_text().splitlines()
    write_rows(path, head, *reversed(rows))
    assert build_here(table(folder, "kind"), cache) == manifest
    # A new class in the middle of the alphabet, a path that comes twice, and a text in a column of numbers.
    write_rows(path, head, "0003.jpg,cow,1,1,?,z", *rows)
    with pytest.raises(SourceError, match=r"'0003\.jpg'"):  # the first row of a path keeps its plain name
        build_here(table(folder, "kind"), cache)
    write_rows(path, head, *rows, "0003.jpg,cow,1,1,?,z")
    manifest = build_here(table(folder, "kind"), cache)
    samples = Cache(cache, manifest).samples
    assert list(samples.paths)[-1] == "0003.jpg#2"
    assert samples.labels is not None
    names = [manifest.classes[label] for label in samples.labels]
    assert names == ["cat", "dog", "cat", "dog", "emu", "cat", "cow"]


def test_class_names_of_a_dataset_that_change_places_are_refused(tmp_path: Path) -> None:
    build_here(labelled([0, 1, 0], ("cat", "dog")), tmp_path / "cache")
    for classes in (("dog", "cat"), ("cat",), ()):
        for labels in ([0, 1, 0], [0, 1, 0, 0]):
            with pytest.raises(SourceError, match="has the classes"):
                build_here(labelled(labels, classes), tmp_path / "cache")
    assert build_here(labelled([0, 1, 0, 2], ("cat", "dog", "emu")), tmp_path / "cache").samples == 4


@pytest.mark.parametrize("now", [[1, 1], [None, None], [(0.0,), (0.5,)]], ids=["other", "none", "numbers"])
def test_labels_of_loaded_samples_are_compared_too(tmp_path: Path, now: list[Label]) -> None:
    build_here(labelled([0, 1]), tmp_path / "cache")
    with pytest.raises(SourceError, match="label"):
        build_here(labelled(now), tmp_path / "cache")


@pytest.mark.slow
def test_nothing_is_refused_that_did_not_change(folder: Path, tmp_path: Path) -> None:
    sources: list[Any] = [
        table(folder, "kind"),
        table(folder, "age", "split"),
        table(folder),
        labelled([(0.5, float("nan"))] * 3),
        labelled([None] * 3, columns={"site": "a", "weight": 1.5}),
        labelled([1, 0], columns={"site": "a"}),
    ]
    for number, source in enumerate(sources):
        cache = tmp_path / str(number)
        assert build_here(source, cache) == build_here(source, cache)


_KINDS: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "text": (("kind",), "auto", "classes", "3 classes: cat 3, dog 2, emu 1"),
    "ages": (
        ("age",),
        "auto",
        "classes",
        r"4 classes named 7 to 99 \(.* --labels numbers\): 7 2, 31 2",
    ),
    "ages as numbers": (("age",), "numbers", "numbers", "numbers from 7 to 99"),
    "folds as classes": (("fold",), "classes", "classes", "3 classes named 0 to 2"),
    "two columns": (("age", "split"), "auto", "numbers", "numbers, 2 a sample, from 0 to 99"),
    "one of 0 and 1": (("split",), "auto", "classes", "2 classes: 0 3, 1 3"),
    "none": ((), "auto", "none", "unlabelled; columns that were not used: 'kind', 'split'"),
}


@pytest.mark.parametrize(("columns", "asked", "kind", "text"), _KINDS.values(), ids=_KINDS)
def test_what_labels_were_read_as_is_stated(
    folder: Path, tmp_path: Path, columns: tuple[str, ...], asked: Any, kind: str, text: str
) -> None:
    source = table(folder, *columns, fold=None if "fold" in columns else "fold")
    manifest = build_here(source, tmp_path / "cache", labels=asked)
    assert describe(manifest)["labels"]["kind"] == kind
    assert any(re.match(f"labels +{text}", line) for line in describe_lines(manifest))
    assert build_here(source, tmp_path / "cache", labels=asked) == manifest


def test_labels_read_otherwise_are_refused_and_a_repair_reads_them_as_they_were_read(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    build_here(table(folder, "age"), cache, labels="numbers")
    before = digests(cache)
    with pytest.raises(SourceError, match="another label"):
        build_here(table(folder, "age"), cache)
    (cache / "index.npy").unlink()
    repair_cache(table(folder, "age"), cache, jobs=1)
    assert digests(cache) == before


def test_an_interrupted_run_is_not_finished_with_labels_read_otherwise(tmp_path: Path) -> None:
    source, cache = labelled([3, 7, 5]), tmp_path / "cache"

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_here(source, cache, check=interrupt)
    with pytest.raises(SourceError, match="started with --labels auto, now numbers"):
        build_here(source, cache, labels="numbers")
    assert build_here(source, cache).classes == tuple(map(str, range(8)))


_NOT: dict[str, tuple[list[Label], str]] = {
    "several as classes": ([(1.0, 1.0)] * 2, "classes"),
    "a fraction as a class": ([(0.5,), (0.5,)], "classes"),
    "values as several": ([(0.5, 1.0)] * 2, "multilabel"),
}


@pytest.mark.parametrize(("labels", "asked"), _NOT.values(), ids=_NOT)
def test_labels_that_are_not_what_was_asked_are_refused(tmp_path: Path, labels: list[Label], asked: Any) -> None:
    with pytest.raises(SourceError, match="has the label"):
        build_here(labelled(labels), tmp_path / "cache", labels=asked)


def test_names_that_are_no_numbers_are_refused_as_numbers(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"'0000\.jpg': has the label 'cat', which is no number"):
        build_here(table(folder, "kind"), tmp_path / "cache", labels="numbers")
    with pytest.raises(TpucacheError, match="labels is one of auto, classes, numbers, multilabel"):
        build_here(table(folder, "kind"), tmp_path / "cache", labels="ages")  # type: ignore[arg-type]  # a user's


@pytest.mark.slow
def test_what_could_be_labels_is_warned_of_where_there_are_none(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_here(table(folder), tmp_path / "a")
    build_here(labelled([None] * 3, columns={"fine_label": 3, "weight": 1.0}), tmp_path / "b")
    first, second = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "no labels, and 'kind', 'split' may be" in first
    assert "no labels, and 'fine_label' may be" in second
    build_here(table(folder, "kind"), tmp_path / "c")
    build_here(labelled([1, 2], columns={"fine_label": 3}), tmp_path / "d")
    assert len(caplog.records) == 2


@pytest.mark.parametrize("labels", [1, "all", [], {"kind": 3, "unused": 4, "asked": []}, {"unused": [[]]}], ids=str)
def test_what_a_hostile_manifest_says_of_labels_is_no_error(labels: Any, tmp_path: Path) -> None:
    manifest = build_here(labelled([None] * 2), tmp_path / "cache")
    assert isinstance(manifest.source, dict)
    for kind in ({}, {"kind": "numbers"}, {"kind": "none"}):
        manifest.source["labels"] = {**labels, **kind} if isinstance(labels, dict) else labels
        other = Manifest.from_json(manifest.text)
        describe(other)
        describe_lines(other)
