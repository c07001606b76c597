"""Tables, labels and folds."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import numpy as np
from lab import (
    CLASSES,
    COUNT,
    Lab,
    array,
    assert_same,
    check_photos,
    class_of,
    number_of,
    pixels,
    table_rows,
    write_csv,
)
from refusals import Done, assert_refused, succeeded

from tpucache import CachedDataset


def warmup(lab: Lab, content: list[dict[str, Any]] | str | bytes, *words: object, cache: str = "cache") -> Done:
    """Warm up from a table of the shared photographs."""
    table = lab.folder / "table.csv"
    if isinstance(content, list):
        write_csv(table, content)
    else:
        table.write_bytes(content.encode() if isinstance(content, str) else content)
    return lab.warmup(table, cache, "--root", lab.shared.photos, *words)


def test_two_rows_of_one_photograph_with_different_labels(lab):
    double = [*table_rows(6), {**table_rows()[0], "label": "cat"}]
    done = warmup(lab, double, "--label-col", "label")
    succeeded(done)
    dataset = CachedDataset(lab.folder / "cache")
    assert [dataset.classes[int(n)] for n in dataset.labels] == [*[row["label"] for row in table_rows(6)], "cat"]
    assert_same(array(dataset[6][0]), pixels(0))


def test_labels_that_are_missing_or_NaN(lab):
    for value in ("", "  "):
        assert_refused(
            warmup(lab, [*table_rows(5), {**table_rows()[5], "label": value}], "--label-col", "label"),
            "label",
            "0005.png",
        )
    numbers = [{**row, "label": f"{n}.5"} for n, row in enumerate(table_rows(6))]
    for value in ("nan", "NaN", "inf", "-inf", "1e999"):
        numbers[3]["label"] = value
        done = warmup(lab, numbers, "--label-col", "label", cache=f"cache{value}")
        assert_refused(done, "label")


def test_a_column_that_is_not_there(lab):
    for option in ("--label-col", "--fold-col", "--path-col", "--mask-col"):
        assert_refused(warmup(lab, table_rows(), option, "nosuch"), "nosuch", "path")


def test_a_column_given_for_two_meanings(lab):
    done = warmup(lab, table_rows(), "--label-col", "fold", "--fold-col", "fold")
    succeeded(done)
    dataset = CachedDataset(lab.folder / "cache")
    assert dataset.labels.tolist() == np.asarray(dataset.table["fold"]).tolist()


def test_options_of_a_table_for_a_folder(lab):
    assert_refused(lab.warmup(lab.shared.photos, "cache", "--label-col", "label"), "leave --label-col out", status=2)


def test_photographs_that_a_table_names_but_nobody_has(lab):
    table = [*table_rows(5), {**table_rows()[0], "path": "ant/9999.png"}]
    assert_refused(warmup(lab, table, "--label-col", "label"), "9999.png")
    done = succeeded(warmup(lab, table, "--label-col", "label", "--on-error", "skip", cache="second"))
    assert "9999.png" in done.out
    check_photos(CachedDataset(lab.folder / "second"), class_of, range(5))


def test_tables_from_other_programs(lab):
    lines = ['"path","label","note"'] + [f'"{r["path"]}","{r["label"]}","a, ""b""\nc"' for r in table_rows(7)]
    content = ("\r\n".join(lines) + "\r\n").encode("utf-8-sig")
    succeeded(warmup(lab, content, "--label-col", "label"))
    dataset = CachedDataset(lab.folder / "cache")
    assert {*dataset.table["note"]} == {'a, "b"\nc'}
    check_photos(dataset, class_of, range(7))


def test_tables_of_other_forms(lab):
    names = "\n".join(f"{r['path']};{r['label']}" for r in table_rows(5))
    for content in (
        f"path;label\n{names}\n",
        "",
        "path,label\n",
        "path,label\na.png,ant,extra\n",
        "path,path\na,b\n",
        b"\xff\xfe\0",
    ):
        assert_refused(warmup(lab, content, "--label-col", "label"), "table.csv|label|path")


def test_paths_that_leave_the_root(lab):
    shutil.copy(lab.shared.photos / "ant" / "0000.png", lab.folder / "0000.png")
    absolute = [
        {"path": str(lab.folder / "0000.png"), "label": "ant"},
        {"path": "../photos/bee/0001.png", "label": "bee"},
    ]
    done = warmup(lab, absolute, "--label-col", "label")
    succeeded(done)
    check_photos(CachedDataset("cache"), class_of, [0, 1])


def test_whole_numbers_as_labels(lab):
    done = succeeded(warmup(lab, [{**r, "label": 20 + n} for n, r in enumerate(table_rows())], "--label-col", "label"))
    said = done.out + done.err
    assert "label" in said
    assert "class" in said
    dataset = CachedDataset(lab.folder / "cache")
    labels = [float(dataset.classes[int(n)]) if dataset.classes else float(n) for n in dataset.labels]
    assert labels == [20.0 + n for n in range(COUNT)]


def test_labels_that_look_like_numbers(lab):
    names = ("007", "7", "1e3")
    succeeded(warmup(lab, [{**r, "label": names[n % 3]} for n, r in enumerate(table_rows())], "--label-col", "label"))
    dataset = CachedDataset(lab.folder / "cache")
    assert not dataset.labels.dtype.is_floating_point
    check_photos(dataset, lambda n: names[n % 3], range(COUNT))


def test_a_column_that_could_be_a_label_but_was_not_named(lab):
    done = succeeded(warmup(lab, table_rows()))
    said = done.out + done.err
    assert "label" in said, f"a warning that there are no labels: {said!r}"


def test_folds_that_are_missing_or_no_numbers(lab):
    for value in ("", "-2", "1.5"):
        table = [{**r, "fold": value if n == 4 else n % 3} for n, r in enumerate(table_rows())]
        done = warmup(lab, table, "--label-col", "label", "--fold-col", "fold", cache=f"cache {value}")
        assert_refused(done, "fold")


def test_columns_and_selections_stay_beside_their_samples(lab):
    table = [{**r, "age": 20 + n} for n, r in enumerate(table_rows())][::-1]
    table[3]["path"] = "bee/nosuch.png"
    succeeded(warmup(lab, table, "--label-col", "label", "--on-error", "skip"))
    dataset = CachedDataset(lab.folder / "cache")
    for path, age in zip(dataset.paths, np.asarray(dataset.table["age"]).tolist(), strict=True):
        assert age == 20 + number_of(path), path
    gone = COUNT - 1 - 3
    check_photos(dataset, class_of, [n for n in range(COUNT) if n != gone])


def test_several_labels_a_sample(lab):
    table = [{**r, "label": "cat;ant" if n % 2 else "bee"} for n, r in enumerate(table_rows())]
    succeeded(warmup(lab, table, "--label-col", "label", "--label-sep", ";"))
    dataset = CachedDataset(lab.folder / "cache")
    assert sorted(dataset.classes) == sorted(CLASSES)
    for n, vector in enumerate(dataset.labels.tolist()):
        named = {name for name, value in zip(dataset.classes, vector, strict=True) if value}
        assert named == ({"cat", "ant"} if n % 2 else {"bee"}), f"row {n}"


def test_what_inspect_says_of_a_cache(lab):
    report = json.loads(succeeded(lab.command("inspect", lab.shared.folds, "--json")).out)
    found = [report[key] for key in ("samples", "records", "classes", "skipped")]
    names = [*report["classes"]]
    assert (found[0], found[1], found[3]) == (COUNT, COUNT, [])
    assert report["bytes"] == sum(
        os.stat(path).st_size for path in lab.shared.folds.iterdir() if path.name != "manifest.json"
    )
    assert sorted(names) == sorted(CLASSES)
