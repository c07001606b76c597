"""relabel: other labels, folds and columns for the same records, or a clear refusal that changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import build_here, digests, write_rows
from PIL import Image

from tpucache import CachedDataset, CachedLoader, Manifest, Recipe, repair_cache, verify_cache
from tpucache.cli import main
from tpucache.errors import BuildError, DamageError, NotACacheError, SourceError, TpucacheError, UsageError
from tpucache.runs import LAST_NAME
from tpucache.training.weights import load_checkpoint
from tpucache.warmup import TableOptions, compact_cache, delete_samples, relabel_cache

pytestmark = pytest.mark.usefixtures("short_runs")

KIND = TableOptions(label_cols=("kind",))


@pytest.fixture
def copy(cache: Path, tmp_path: Path) -> Path:
    return shutil.copytree(cache, tmp_path / "cache")


@pytest.fixture
def table(cache: Path, tmp_path: Path) -> Path:
    rows = [
        f"{path},{'xyz'[number % 3]},{number % 5},{number + 0.5},{Path(path).name}"
        for number, path in enumerate(CachedDataset(cache).paths)
    ]
    return write_rows(tmp_path / "labels.csv", "path,kind,fold,age,file", *rows[::-1])


def test_labels_folds_and_columns_change_and_records_do_not(copy: Path, table: Path) -> None:
    shards = {name: digest for name, digest in digests(copy).items() if name.endswith(".lmdb")}
    before = CachedDataset(copy)
    labels = before.labels
    manifest = relabel_cache(copy, table, TableOptions(label_cols=("kind",), fold_col="fold"))
    after = CachedDataset(copy)
    assert manifest == Manifest.load(copy)
    assert (after.classes, manifest.statistics.class_counts) == (("x", "y", "z"), (50, 50, 50))
    assert after.labels.tolist() == [number % 3 for number in range(150)]
    assert np.asarray(after.table["fold"]).tolist() == [number % 5 for number in range(150)]
    assert np.asarray(after.table["age"])[:2].tolist() == [0.5, 1.5]
    assert before.labels.tolist() == labels.tolist()
    assert len(before.paths) == 150  # which are read now
    assert verify_cache(copy) == []
    assert shards.items() <= digests(copy).items()
    assert len(list(copy.iterdir())) == len(shards) + 3 + 4  # two tables and the manifest of before, and times
    assert after.labels.tolist() != labels.tolist()
    assert before.manifest.identity != manifest.identity
    images, labels = next(iter(CachedLoader(after, 4)))
    assert (labels.tolist(), images[3].tolist()) == ([0, 1, 2, 0], before[3][0].tolist())


@pytest.mark.parametrize("spell", [lambda path: f"./{path}", lambda path: path.replace("/", "\\")])
def test_rows_match_whose_paths_are_only_spelled_otherwise(copy: Path, spell: Callable[[str], str]) -> None:
    rows = [f"{spell(path)},{number % 2}" for number, path in enumerate(CachedDataset(copy).paths)]
    relabel_cache(copy, write_rows(copy.parent / "t.csv", "path,kind", *rows), KIND)
    assert CachedDataset(copy).labels.tolist() == [number % 2 for number in range(150)]


def test_what_the_table_lacks_stays(copy: Path, table: Path) -> None:
    labels = CachedDataset(copy).labels.tolist()
    relabel_cache(copy, table, TableOptions(fold_col="fold"))
    dataset = CachedDataset(copy)
    assert (dataset.labels.tolist(), len(dataset.classes)) == (labels, 3)
    relabel_cache(copy, write_rows(table, "path,new", *(f"{path},1" for path in dataset.paths)))
    assert {"fold", "age", "new"} <= set(CachedDataset(copy).table)


def test_the_same_labels_again_change_nothing(copy: Path, table: Path) -> None:
    relabel_cache(copy, table, KIND)
    before = digests(copy)
    relabel_cache(copy, table, KIND)
    assert digests(copy) == before


@pytest.mark.parametrize(
    ("columns", "labels", "text"),
    [
        (("fold",), "numbers", "numbers from 0 to 4"),
        (("kind",), "classes", "3 classes: x 50, y 50, z 50"),
        (("fold", "age"), "auto", "numbers, 2 a sample, from 0 to 149.5"),
    ],
)
def test_labels_of_another_kind_are_read_as_by_warmup(
    columns: tuple[str, ...], labels: Any, text: str, copy: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [part for name in columns for part in ("--label-col", name)]
    assert main(["relabel", str(copy), str(table), *flags, "--labels", labels]) == 0
    assert text in capsys.readouterr().out
    assert main(["inspect", str(copy)]) == 0
    assert text in capsys.readouterr().out


def test_rows_match_by_file_name_or_id_and_others_are_reported(
    copy: Path, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    relabel_cache(copy, table, TableOptions(path_col="file", label_cols=("kind",)))
    assert CachedDataset(copy).labels.tolist() == [number % 3 for number in range(150)]
    paths = CachedDataset(copy).paths
    write_rows(table, "path,id", *(f"{path},n{number}" for number, path in enumerate(paths)))
    relabel_cache(copy, table)
    write_rows(table, "id,kind", *(f"n{number},{'vw'[number % 2]}" for number in range(152)))
    relabel_cache(copy, table, KIND)
    assert CachedDataset(copy).labels.tolist() == [number % 2 for number in range(150)]
    assert "2 rows" in caplog.text
    assert "'n150', 'n151'" in caplog.text


def test_classes_may_be_given_by_a_file_or_another_cache(copy: Path, cache: Path, table: Path, tmp_path: Path) -> None:
    names = write_rows(tmp_path / "classes.txt", "0001", "z", "", "y", "x")
    relabel_cache(copy, table, KIND, classes=names)
    dataset = CachedDataset(copy)
    assert dataset.classes == ("0001", "z", "y", "x")
    assert dataset.labels[:3].tolist() == [3, 2, 1]
    with pytest.raises(SourceError, match="class 'z', which is none of the 3 given classes: 'cat'"):
        relabel_cache(copy, table, KIND, classes=cache)
    with pytest.raises(UsageError, match="'y' more than once"):
        relabel_cache(copy, table, KIND, classes=["x", "y", "y"])
    assert CachedDataset(copy).classes == dataset.classes


@pytest.mark.parametrize(
    ("classes", "cell", "reason"),
    [
        ("a,b", "a;b", "'a;b' is several: add --label-sep ';'"),
        ("a,b;c", "name:b%3Bc", "is several"),
        ("value_0,value_1", "1.5;-2", "'1.5;-2' is several: .* columns of numbers by --label-col"),
    ],
)
def test_several_names_or_numbers_in_a_table_of_predictions_are_no_class(
    copy: Path, tmp_path: Path, classes: str, cell: str, reason: str
) -> None:
    rows = [f"{at},{path},{cell},{cell},0.5,0.5" for at, path in enumerate(CachedDataset(copy).paths)]
    path = write_rows(tmp_path / "predictions.csv", f"sample,path,label,prediction,{classes}", *rows)
    for column in ("label", "prediction"):
        with pytest.raises(SourceError, match=reason):
            relabel_cache(copy, path, TableOptions(label_cols=(column,)))
    single = [row.replace(cell, "a;b") for row in rows]
    path = write_rows(path, "sample,path,label,prediction,a;b,c", *single)  # one class with a semicolon in its name
    relabel_cache(copy, path, TableOptions(label_cols=("label",)))
    assert CachedDataset(copy).classes == ("a;b",)


_REFUSED: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "another dataset's table": (["path,kind", "dog/1.jpg,x"], {}, "no row .* such as 'dog/1.jpg', .* --path-col"),
    "samples without a row": (["path,kind", "cat/0000.jpg,x"], {}, "149 samples .* have no row"),
    "no label in a row": (["path,kind", "cat/0000.jpg,", "*,x"], {}, "line 2: the row has no label"),
    "two rows of one sample": (["path,kind", "*,x", "cat/0000.jpg,y"], {}, "line 152.*is also in line 2"),
    "a mask": (["path,kind", "*,x"], {"mask_col": "kind"}, "masks .* are for a warmup"),
    "no such column": (["path,kind", "*,x"], {"label_cols": ("breed",)}, "has no column 'breed'"),
    "no table": ([], {}, "has no rows"),
    "run lengths": (["path,kind", "*,x"], {"rle_cols": ("kind",)}, "leave --mask-col, --root and rle_cols out"),
    "a separator of numbers": (["path,kind", "*,1"], {"label_sep": "|", "labels": "numbers"}, "leave it out"),
}


@pytest.mark.parametrize(("rows", "options", "reason"), _REFUSED.values(), ids=_REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    rows: list[str], options: dict[str, Any], reason: str, copy: Path, tmp_path: Path
) -> None:
    before, lines = digests(copy), list[str]()
    for row in rows[1:]:
        if row.startswith("*"):
            named = {line.partition(",")[0] for line in lines}
            lines += [row.replace("*", path) for path in CachedDataset(copy).paths if path not in named]
        else:
            lines.append(row)
    path = write_rows(tmp_path / "odd.csv", "".join(rows[:1]), *lines)
    table = {name: value for name, value in options.items() if name != "labels"}
    with pytest.raises(TpucacheError, match=reason):
        relabel_cache(
            copy, path, TableOptions(**{"label_cols": ("kind",), **table}), labels=options.get("labels", "auto")
        )
    assert digests(copy) == before


def test_a_cache_that_is_unfinished_damaged_or_read_only_is_refused(
    copy: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotACacheError):
        relabel_cache(tmp_path / "nowhere", table, KIND)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(BuildError, match=r"Read-only file system.*copy the cache"):
            relabel_cache(copy, table, KIND)
    assert CachedDataset(copy).classes == ("cat", "dog", "emu")
    min(copy.glob("*.lmdb")).unlink()
    with pytest.raises(DamageError, match="is missing"):
        relabel_cache(copy, table, KIND)


@pytest.mark.slow
def test_a_warmup_that_is_adding_is_finished_first(photos: Path, table: Path, tmp_path: Path) -> None:
    cache = tmp_path / "growing"
    build_here(photos, cache)
    work = cache / ".warmup"
    work.mkdir()
    plan = {"build": "0" * 48, "labels": {}, "asked": {}, "retry": False}
    (work / "plan.json").write_text(json.dumps({**plan, "before": Manifest.load(cache).identity}))
    with pytest.raises(BuildError, match=r"is adding to .* not finished"):
        relabel_cache(cache, table, KIND)
    (work / "plan.json").write_text(json.dumps({**plan, "before": "of an earlier time"}))
    relabel_cache(cache, table, KIND)
    assert not work.exists()


@pytest.mark.slow
def test_a_relabelled_cache_grows_and_is_repaired_from_its_source(
    photos: Path, table: Path, tmp_path: Path, jitter: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "growing"
    build_here(photos, cache)
    relabel_cache(cache, table, TableOptions(label_cols=("kind",), fold_col="fold"))
    build_here(photos, cache, Recipe(size=8, variants=1, augment=jitter))
    assert "was relabelled" in caplog.text
    dataset = CachedDataset(cache, variant=1)
    assert dataset.labels.tolist() == [number % 3 for number in range(150)]
    assert np.asarray(dataset.table["fold"])[:3].tolist() == [0, 1, 2]
    (cache / "v01-00000.lmdb").unlink()
    repair_cache(photos, cache, jobs=1, augment="jitter_by_test:jitter")
    assert verify_cache(cache) == []


@pytest.mark.slow
def test_training_uses_the_new_labels_and_does_not_continue_with_others(
    copy: Path, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    flags = ["--run", str(run), "--backend", "eager", "--epochs", "1", "--batch-size", "32", "--model", "cnn"]
    assert main(["train", str(copy), *flags]) == 0
    relabel_cache(copy, table, KIND)
    assert main(["train", str(copy), *flags, "--resume"]) == 2
    assert "the training data have changed (their records, labels, selection or order)" in capsys.readouterr().err
    assert main(["train", str(copy), *flags[:1], str(tmp_path / "new"), *flags[2:]]) == 0
    assert load_checkpoint(tmp_path / "new" / LAST_NAME)["classes"] == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("keys", "digits"),
    [(["7.png", "8.png", "10.png"], 3), (["7", "8", "10"], 3), (["007.png", "8.png", "010.png"], 3), (["x", "y"], 0)],
)
def test_numbers_that_lost_their_zeros_are_named_with_what_to_do(
    keys: list[str], digits: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "photos").mkdir()
    for number in (7, 8, 10):
        Image.new("L", (2, 2), number).save(tmp_path / "photos" / f"{number:03}.png")
    build_here(tmp_path / "photos", tmp_path / "cache", Recipe(size=2))
    table = write_rows(tmp_path / "labels.csv", "path,kind", *(f"{key},{key}" for key in keys))
    with pytest.raises(SourceError) as caught:
        relabel_cache(tmp_path / "cache", table, KIND)
    assert (f"digits, in pandas `table[column].astype(str).str.zfill({digits})`" in str(caught.value)) is bool(digits)
    good = write_rows(tmp_path / "good.csv", "path,kind", "007.png,a", "008.png,b", "010.png,a")
    relabel_cache(tmp_path / "cache", good, KIND)
    table = write_rows(tmp_path / "some.csv", "path,kind", "007.png,b", "8.png,a")
    relabel_cache(tmp_path / "cache", table, KIND, corrections=True)
    assert "1 rows of" in caplog.text
    assert "zfill(3)" in caplog.text


def test_a_column_that_may_be_the_new_labels_or_folds_and_is_not_used_is_told_of(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = CachedDataset(copy).labels.tolist()
    rows = [f"{path},x,1,2" for path in CachedDataset(copy).paths]
    table = write_rows(copy.parent / "t.csv", "path,label,fold,age", *rows)
    relabel_cache(copy, table)
    assert "column 'label' is only kept as a column, and the labels stay as they were: give --label-col" in caplog.text
    assert "column 'fold' is only kept as a column, and the folds stay as they were: give --fold-col" in caplog.text
    assert CachedDataset(copy).labels.tolist() == labels
    caplog.clear()
    relabel_cache(copy, table, TableOptions(label_cols=("label",), drop=("fold",)))
    assert not caplog.records


def test_the_names_of_columns_of_values_follow_a_relabelling_and_corrections_are_of_these_columns(
    copy: Path, table: Path
) -> None:
    values = TableOptions(label_cols=("age", "fold"))
    assert relabel_cache(copy, table, values).value_names == ("age", "fold")
    swapped = TableOptions(label_cols=("fold", "age"))
    with pytest.raises(SourceError, match="are the columns age, fold, not fold, age: give --label-col age --label-col"):
        relabel_cache(copy, table, swapped, corrections=True)
    assert relabel_cache(copy, table, values, corrections=True).value_names == ("age", "fold")
    assert delete_samples(copy, paths=CachedDataset(copy).paths[:1]).value_names == ("age", "fold")
    assert compact_cache(copy).value_names == ("age", "fold")
    assert relabel_cache(copy, table, TableOptions(fold_col="fold")).value_names == ("age", "fold")
    assert relabel_cache(copy, table, swapped).value_names == ("fold", "age")
    assert relabel_cache(copy, table, KIND).value_names == ()


def test_labels_of_rows_without_a_sample_are_no_classes(copy: Path, tmp_path: Path) -> None:
    paths = CachedDataset(copy).paths
    rows = [f"{path},{number % 2}" for number, path in enumerate(paths)]
    table = write_rows(
        tmp_path / "labels.csv", "path,kind,age", "elsewhere.jpg,unknown,old", *(f"{row},7" for row in rows)
    )
    relabel_cache(copy, table, KIND)
    after = CachedDataset(copy)
    assert np.asarray(after.table["age"]).tolist() == [7] * 150
    assert (after.classes, after.labels.tolist()) == (("0", "1"), [number % 2 for number in range(150)])
    corrections = write_rows(tmp_path / "new.csv", "path,kind", "elsewhere.jpg,unknown", f"{paths[0]},1")
    relabel_cache(copy, corrections, KIND, corrections=True)
    assert CachedDataset(copy).labels[:3].tolist() == [1, 1, 0]
    rows[1] = f"{paths[1]},"
    table = write_rows(tmp_path / "labels.csv", "path,kind", "elsewhere.jpg,unknown", *rows)
    with pytest.raises(SourceError, match="line 4: the row has no label"):
        relabel_cache(copy, table, KIND)


def test_corrections_of_numbers_may_all_be_whole(copy: Path, table: Path, tmp_path: Path) -> None:
    path = CachedDataset(copy).paths[0]
    relabel_cache(copy, table, TableOptions(label_cols=("age",)))
    new = write_rows(tmp_path / "new.csv", "path,age,fold", f"{path},3,1", "elsewhere.jpg,0.5,2")
    relabel_cache(copy, new, TableOptions(label_cols=("age",)), corrections=True)
    assert CachedDataset(copy).labels[:2].tolist() == [[3], [1.5]]
    with pytest.raises(SourceError, match="another form"):
        relabel_cache(copy, new, TableOptions(label_cols=("age", "fold")), corrections=True)
    relabel_cache(copy, table, TableOptions(label_cols=("age", "fold")))
    new = write_rows(tmp_path / "new.csv", "path,age,fold", f"{path},1,0")
    relabel_cache(copy, new, TableOptions(label_cols=("age", "fold")), corrections=True)
    assert CachedDataset(copy).labels[:2].tolist() == [[1, 0], [1.5, 1]]
    wrong = write_rows(tmp_path / "wrong.csv", "path,age,fold", f"{path},old,0")
    with pytest.raises(SourceError, match="has the label 'old', which is no number"):
        relabel_cache(copy, wrong, TableOptions(label_cols=("age",)), corrections=True)
