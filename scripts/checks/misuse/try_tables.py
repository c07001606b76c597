"""Tables, labels and folds."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import numpy as np

from scripts.checks.misuse.lab import CLASSES, COUNT, Lab, array, check_photos, class_of, number_of, pixels, write_csv
from scripts.checks.misuse.outcome import Done, Outcome, Wrong, correct, equal, refused, succeeded, true
from scripts.checks.misuse.rows import row
from tpucache import CachedDataset


def rows(count: int = COUNT) -> list[dict[str, Any]]:
    return [{"path": f"{class_of(n)}/{n:04d}.png", "label": class_of(n), "fold": n % 3} for n in range(count)]


def warmup(lab: Lab, content: list[dict[str, Any]] | str | bytes, *words: object, cache: str = "cache") -> Done:
    """Warm up from a table of the shared photographs."""
    table = lab.folder / "table.csv"
    if isinstance(content, list):
        write_csv(table, content)
    else:
        table.write_bytes(content.encode() if isinstance(content, str) else content)
    return lab.warmup(table, cache, "--root", lab.shared.photos(), *words)


@row
def two_rows_of_one_photograph_with_different_labels(lab: Lab) -> Outcome:
    double = [*rows(6), {**rows()[0], "label": "cat"}]
    done = warmup(lab, double, "--label-col", "label")
    if done.status:
        return refused(done, "0000.png")
    dataset = CachedDataset(lab.folder / "cache")
    equal("labels", [dataset.classes[int(n)] for n in dataset.labels], [*[row["label"] for row in rows(6)], "cat"])
    equal("pixels", array(dataset[6][0]), pixels(0))
    return correct("both rows are samples, each with its own label")


@row
def labels_that_are_missing_or_NaN(lab: Lab) -> Outcome:
    for value in ("", "  "):
        refused(warmup(lab, [*rows(5), {**rows()[5], "label": value}], "--label-col", "label"), "label", "0005.png")
    numbers = [{**row, "label": f"{n}.5"} for n, row in enumerate(rows(6))]
    for value in ("nan", "NaN", "inf", "-inf", "1e999"):
        numbers[3]["label"] = value
        done = warmup(lab, numbers, "--label-col", "label", cache=f"cache{value}")
        if not done.status:
            raise Wrong(f"the label {value} among numbers was accepted: {done.out}")
        outcome = refused(done, "label")
    return outcome


@row
def a_column_that_is_not_there(lab: Lab) -> Outcome:
    for option in ("--label-col", "--fold-col", "--path-col", "--mask-col"):
        outcome = refused(warmup(lab, rows(), option, "nosuch"), "nosuch", "path")
    return outcome


@row
def a_column_given_for_two_meanings(lab: Lab) -> Outcome:
    done = warmup(lab, rows(), "--label-col", "fold", "--fold-col", "fold")
    if done.status:
        return refused(done, "fold", status=done.status)
    dataset = CachedDataset(lab.folder / "cache")
    equal("labels and folds", dataset.labels.tolist(), np.asarray(dataset.table["fold"]).tolist())
    return correct("labels and folds are both the column's numbers")


@row
def options_of_a_table_for_a_folder(lab: Lab) -> Outcome:
    return refused(lab.warmup(lab.shared.photos(), "cache", "--label-col", "label"), "leave it out", status=2)


@row
def photographs_that_a_table_names_but_nobody_has(lab: Lab) -> Outcome:
    table = [*rows(5), {**rows()[0], "path": "ant/9999.png"}]
    refused(warmup(lab, table, "--label-col", "label"), "9999.png")
    done = succeeded(warmup(lab, table, "--label-col", "label", "--on-error", "skip", cache="second"))
    true("it is listed", "9999.png" in done.out)
    return correct("refused, or listed: " + check_photos(CachedDataset(lab.folder / "second"), class_of, range(5)))


@row
def tables_from_other_programs(lab: Lab) -> Outcome:
    lines = ['"path","label","note"'] + [f'"{r["path"]}","{r["label"]}","a, ""b""\nc"' for r in rows(7)]
    content = ("\r\n".join(lines) + "\r\n").encode("utf-8-sig")
    succeeded(warmup(lab, content, "--label-col", "label"))
    dataset = CachedDataset(lab.folder / "cache")
    equal("notes", {*dataset.table["note"]}, {'a, "b"\nc'})
    return correct("byte order mark, CRLF, quotes: " + check_photos(dataset, class_of, range(7)))


@row
def tables_of_other_forms(lab: Lab) -> Outcome:
    names = "\n".join(f"{r['path']};{r['label']}" for r in rows(5))
    for content in (
        f"path;label\n{names}\n",
        "",
        "path,label\n",
        "path,label\na.png,ant,extra\n",
        "path,path\na,b\n",
        b"\xff\xfe\0",
    ):
        outcome = refused(warmup(lab, content, "--label-col", "label"), "table.csv|label|path")
    return outcome


@row
def paths_that_leave_the_root(lab: Lab) -> Outcome:
    shutil.copy(lab.shared.photos() / "ant" / "0000.png", lab.folder / "0000.png")
    absolute = [
        {"path": str(lab.folder / "0000.png"), "label": "ant"},
        {"path": "../photos/bee/0001.png", "label": "bee"},
    ]
    done = warmup(lab, absolute, "--label-col", "label")
    if done.status:
        return refused(done, "0000.png|0001.png")
    return correct("absolute paths and .. are followed: " + check_photos(CachedDataset("cache"), class_of, [0, 1]))


@row
def whole_numbers_as_labels(lab: Lab) -> Outcome:
    done = succeeded(warmup(lab, [{**r, "label": 20 + n} for n, r in enumerate(rows())], "--label-col", "label"))
    said = done.out + done.err
    true(f"the summary says that labels are taken as classes or numbers: {said!r}", "label" in said and "class" in said)
    dataset = CachedDataset(lab.folder / "cache")
    labels = [float(dataset.classes[int(n)]) if dataset.classes else float(n) for n in dataset.labels]
    equal("labels", labels, [20.0 + n for n in range(COUNT)])
    return correct("each sample has its number, and the summary says as what")


@row
def labels_that_look_like_numbers(lab: Lab) -> Outcome:
    names = ("007", "7", "1e3")
    succeeded(warmup(lab, [{**r, "label": names[n % 3]} for n, r in enumerate(rows())], "--label-col", "label"))
    dataset = CachedDataset(lab.folder / "cache")
    if dataset.labels.dtype.is_floating_point:
        raise Wrong(f"the names 007, 7 and 1e3 became the numbers {sorted({*dataset.labels.flatten().tolist()})}")
    return correct(check_photos(dataset, lambda n: names[n % 3], range(COUNT)))


@row
def a_column_that_could_be_a_label_but_was_not_named(lab: Lab) -> Outcome:
    done = succeeded(warmup(lab, rows()))
    said = done.out + done.err
    true(f"a warning that there are no labels: {said!r}", "label" in said)
    return correct("it warns: " + " ".join(line for line in said.splitlines() if "label" in line)[:150])


@row
def folds_that_are_missing_or_no_numbers(lab: Lab) -> Outcome:
    for value in ("", "-1", "1.5"):
        table = [{**r, "fold": value if n == 4 else n % 3} for n, r in enumerate(rows())]
        done = warmup(lab, table, "--label-col", "label", "--fold-col", "fold", cache=f"cache {value}")
        if done.status:
            outcome = refused(done, "fold")
            continue
        outcome = refused(
            lab.train(lab.folder / f"cache {value}", lab.folder / "run", "--valid", "fold=0"), "fold", status=2
        )
    return outcome


@row
def columns_and_selections_stay_beside_their_samples(lab: Lab) -> Outcome:
    table = [{**r, "age": 20 + n} for n, r in enumerate(rows())][::-1]
    table[3]["path"] = "bee/nosuch.png"
    succeeded(warmup(lab, table, "--label-col", "label", "--on-error", "skip"))
    dataset = CachedDataset(lab.folder / "cache")
    for path, age in zip(dataset.paths, np.asarray(dataset.table["age"]).tolist(), strict=True):
        equal(path, age, 20 + number_of(path))
    gone = COUNT - 1 - 3
    return correct(
        check_photos(dataset, class_of, [n for n in range(COUNT) if n != gone]) + "; columns are beside them"
    )


@row
def several_labels_a_sample(lab: Lab) -> Outcome:
    table = [{**r, "label": "cat;ant" if n % 2 else "bee"} for n, r in enumerate(rows())]
    succeeded(warmup(lab, table, "--label-col", "label", "--label-sep", ";"))
    dataset = CachedDataset(lab.folder / "cache")
    equal("classes", sorted(dataset.classes), sorted(CLASSES))
    for n, vector in enumerate(dataset.labels.tolist()):
        named = {name for name, value in zip(dataset.classes, vector, strict=True) if value}
        equal(f"row {n}", named, {"cat", "ant"} if n % 2 else {"bee"})
    return correct("each vector names the row's classes")


@row
def what_inspect_says_of_a_cache(lab: Lab) -> Outcome:
    report = json.loads(succeeded(lab.command("inspect", lab.shared.folds(), "--json")).out)
    found = [report[key] for key in ("samples", "records", "classes", "skipped")]
    names = [*report["classes"]]
    equal("samples, records, skipped", (found[0], found[1], found[3]), (COUNT, COUNT, []))
    equal(
        "bytes",
        report["bytes"],
        sum(os.stat(path).st_size for path in lab.shared.folds().iterdir() if path.name != "manifest.json"),
    )
    equal("classes", sorted(names), sorted(CLASSES))
    return correct("samples, records, bytes and classes are what was written")
