"""compare, suspects and the folds of relabel, as they are typed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from photographs import build_pictures, edited, picture

from tpucache import CachedDataset
from tpucache.cli import main
from tpucache.insight import hashes
from tpucache.warmup.relabel import set_columns

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches `train` (20 pictures, two of them copies) and `test` (9, of them two records and three edits of train)."""
    folder = tmp_path_factory.mktemp("insight")
    train = {f"{'ab'[number % 2]}/{number:02d}.png": picture(number) for number in range(18)}
    train |= {"a/copy1.png": edited(picture(3), 2), "b/copy2.png": edited(picture(4), 0)}
    test = {f"{'ab'[number % 2]}/t{number:02d}.png": picture(number + 100) for number in range(4)}
    test |= {"a/same0.png": picture(0), "b/same5.png": picture(5)}
    test |= {f"b/near{number}.png": edited(picture(number), number) for number in (6, 8, 9)}
    for name, pictures, options in (
        ("train", train, {}),
        ("test", test, {}),
        ("jpeg", test, {"codec": "jpeg", "quality": 80}),
        ("other", {"a/x.png": picture(900)}, {}),
    ):
        build_pictures(folder / f"{name}-photos", pictures, **options).rename(folder / name)
    return folder


def ask(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    status = main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def paths_of(pairs: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(pair["first"]["path"], pair["second"]["path"]) for pair in pairs}


def test_compare_finds_equal_records_and_near_copies(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = ask(capsys, "compare", caches / "train", caches / "test")
    assert (status, report["found"]) == (1, True)
    (found,) = report["comparisons"]
    assert found["exact"]["compared"]
    assert paths_of(found["exact"]["pairs"]) == {("a/00.png", "a/same0.png"), ("b/05.png", "b/same5.png")}
    assert paths_of(found["near"]["pairs"]) == {
        ("a/06.png", "b/near6.png"),
        ("a/08.png", "b/near8.png"),
        ("b/09.png", "b/near9.png"),
    }
    assert [pair["mirrored"] for pair in found["near"]["pairs"] if "near8" in pair["second"]["path"]] == [True]
    assert (found["near"]["threshold"], found["near"]["blank"], found["near"]["count"]) == (48, 0, 3)
    are_copies = {pair["second"]["path"]: pair["copy"] for pair in found["near"]["pairs"]}
    assert found["near"]["copies"] == sum(are_copies.values())
    assert are_copies["b/near6.png"]  # halved
    assert are_copies["b/near8.png"]  # mirrored


def test_compare_says_in_lines_what_it_found_and_status_0_is_for_nothing(
    caches: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(caches / "train"), str(caches / "test")]) == 1
    text = capsys.readouterr().out
    assert "'a/06.png' and 'b/near6.png'" in text
    assert "labels 'a' and 'b'" in text
    assert "at most 48 of 256 bits apart, all images compared" in text
    assert main(["compare", str(caches / "train"), str(caches / "other")]) == 0
    assert "equal records  0" in capsys.readouterr().out


def test_compare_of_other_codecs_compares_pictures_alone(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = ask(capsys, "compare", caches / "train", caches / "jpeg", caches / "other")
    first, second, third = report["comparisons"]
    assert status == 1
    assert first["exact"] == {
        "compared": False,
        "reason": "the two caches were made with different settings: codec, fields, quality",
        "count": 0,
        "pairs": [],
    }
    assert first["near"]["count"] == 5
    assert (second["near"]["count"], third["near"]["count"]) == (0, 0)


def test_folds_keep_copies_together(caches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = Path(shutil.copytree(caches / "train", tmp_path / "cache"))
    status, report = ask(capsys, "relabel", cache, "--make-folds", "4", "--groups", "duplicates")
    assert status == 0
    assert report["folds"]["groups"] == 2
    assert sorted(report["folds"]["sizes"]) == [5, 5, 5, 5]
    assert report["folds"]["largest_group"] == 2
    dataset = CachedDataset(cache)
    fold = dict(zip(dataset.paths, np.asarray(dataset.table["fold"]).tolist(), strict=True))
    assert fold["b/03.png"] == fold["a/copy1.png"]
    assert fold["a/04.png"] == fold["b/copy2.png"]
    _, again = ask(capsys, "relabel", cache, "--make-folds", "4", "--groups", "duplicates")
    assert again["folds"] == report["folds"]
    assert np.asarray(CachedDataset(cache).table["fold"]).tolist() == list(fold.values())
    assert dataset.classes == ("a", "b")


def test_folds_follow_a_column_of_groups(caches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = Path(shutil.copytree(caches / "train", tmp_path / "cache"))
    table = tmp_path / "patients.csv"
    rows = [f"{path},p{number % 6}" for number, path in enumerate(CachedDataset(cache).paths)]
    table.write_text("path,patient\n" + "\n".join(rows) + "\n")
    command = ["relabel", str(cache), str(table), "--make-folds", "3", "--groups", "patient", "--stratify", "none"]
    assert main(command) == 0
    assert "groups: 6 of more than one sample, none divided" in capsys.readouterr().out
    dataset = CachedDataset(cache)
    folds = np.asarray(dataset.table["fold"])
    assert all(len(set(folds[np.arange(20) % 6 == patient])) == 1 for patient in range(6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "train"], "give two caches or more"),
        (["compare", "train", "other", "--threshold", "200"], "a threshold is 0 to 96"),
        (["suspects", "predictions"], "are not probabilities"),
        (["report", "train", "--findings", "--predictions", "predictions"], "are not probabilities"),
        (["relabel", "train", "--corrections", "--label-col", "x"], "the following arguments are required: TABLE"),
        (["relabel", "train", "--groups", "duplicates", "t.csv"], "--groups and --stratify are for --make-folds"),
        (["relabel", "train", "--make-folds", "3", "--label-col", "x"], "the options for a table need a .csv"),
        (["relabel", "train", "--make-folds", "3", "--groups", "patient"], "has no column 'patient' for groups"),
        (["relabel", "train", "--make-folds", "1"], "divided into 2 to 20 folds, not 1"),
        (["relabel", "train", "--make-folds", "99"], "divided into 2 to 20 folds, not 99"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(
    caches: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "predictions" / "out_of_fold.csv"
    table.parent.mkdir()
    table.write_text("sample,path,label,prediction,a,b\n0,x,a,a,1e308,1e308\n")
    places = {"train": caches / "train", "other": caches / "other", "predictions": table.parent}
    output = ["-o", tmp_path / "out"] if "predictions" in arguments else []
    before = (caches / "train" / "manifest.json").read_bytes()
    with contextlib.suppress(SystemExit):
        assert main([str(places.get(each, each)) for each in (*arguments, *output)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert (caches / "train" / "manifest.json").read_bytes() == before


def test_suspects_are_corrected_by_the_table_that_they_are_written_to(
    caches: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Path(shutil.copytree(caches / "train", tmp_path / "cache"))
    dataset = CachedDataset(cache)
    rows = ["sample,path,label,prediction,a,b"]
    for number, path, label in zip(dataset.numbers.tolist(), dataset.paths, dataset.labels.tolist(), strict=True):
        doubt = 0.9 if path in ("a/02.png", "b/07.png") else 0.1
        probabilities = (doubt, 1 - doubt) if label else (1 - doubt, doubt)
        rows.append(
            f"{number},{path},{'ab'[label]},{'ab'[probabilities[1] > 0.5]},{probabilities[0]},{probabilities[1]}"
        )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "out_of_fold.csv").write_text("\n".join(rows) + "\n")
    table = tmp_path / "suspects.csv"
    status, report = ask(capsys, "suspects", tmp_path / "run", "--top", "2", "-o", table)
    assert status == 0
    assert report["ranked"] == 20
    assert [(each["path"], each["score"]) for each in report["suspects"]] == [("a/02.png", 0.9), ("b/07.png", 0.9)]
    corrected = [{**row, "label": row["predicted"]} for row in csv.DictReader(io.StringIO(table.read_text()))]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, corrected[0])
        writer.writeheader()
        writer.writerows(corrected)
    assert main(["relabel", str(cache), str(table)]) == 0
    after = CachedDataset(cache)
    changed = [path for path, old, new in zip(dataset.paths, dataset.labels, after.labels, strict=True) if old != new]
    assert changed == ["a/02.png", "b/07.png"]
    assert after.manifest.statistics.class_counts == (10, 10)
    assert sorted(after.table) == sorted(dataset.table)


@pytest.mark.parametrize("options", [["--valid", "fold=1"], ["--folds"]], ids=["valid", "folds"])
def test_train_warns_of_copies_that_validate(
    caches: Path,
    tmp_path: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    cache = Path(shutil.copytree(caches / "train", tmp_path / "cache"))
    together = np.arange(20) % 2
    hashes(cache)
    paths = list(CachedDataset(cache).paths)
    for copy, original in (("a/copy1.png", "b/03.png"), ("b/copy2.png", "a/04.png")):
        together[paths.index(copy)] = together[paths.index(original)]
    apart = together.copy()
    apart[paths.index("a/copy1.png")] ^= 1

    (tmp_path / "untrained.py").write_text("def model(*_, **__):\n    raise ValueError('nothing is trained here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for number, (fold, warns) in enumerate(((together, False), (apart, True))):
        set_columns(cache, {"fold": fold})
        run = ["--run", str(tmp_path / f"run{number}"), "--backend", "torch", "--model", "untrained:model"]
        assert main(["train", str(cache), *run, *options]) == 2
        said = capsys.readouterr().err
        assert "nothing is trained here" in said
        assert ("are copies of training samples (found by comparing details), such as" in said) == warns
        assert ("--make-folds N --groups duplicates" in said) == warns
