"""Which samples are used, which classes they have, and which cache a new one is like."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from made import build_here, write_photos, write_rows
from stops import Stopped, stop_after

from tpucache import CachedDataset, Manifest, Recipe, repair_cache, verify_cache
from tpucache.cli import main
from tpucache.errors import SampleError, SourceError, TpucacheError, UsageError
from tpucache.warmup import FolderSource, TableOptions, TableSource, open_source, select_source

pytestmark = pytest.mark.usefixtures("short_runs")


@pytest.fixture(scope="module")
def train_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    source = write_photos(folder / "source", 12, size=(30, 20))
    build_here(source, folder / "cache", Recipe(size=(8, 12), fit="pad", codec="jpeg", quality=80))
    return folder / "cache"


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "valid", 6, ("cat", "emu"), (30, 20))


def paths_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.jpg"))


def labels_of(cache: Path) -> dict[str, str]:
    dataset = CachedDataset(cache)
    labels = dataset.labels.tolist()
    return {path: dataset.classes[label] for path, label in zip(dataset.paths, labels, strict=True)}


def test_a_validation_set_that_lacks_a_class_numbers_the_others_as_training_does(
    train_cache: Path, valid: Path, tmp_path: Path
) -> None:
    manifest = build_here(valid, tmp_path / "cache", classes=train_cache)
    assert manifest.classes == ("cat", "dog", "emu")
    assert manifest.statistics.class_counts == (3, 0, 3)
    assert all(path.startswith(name) for path, name in labels_of(tmp_path / "cache").items())
    assert build_here(valid, tmp_path / "cache", classes=["cat", "dog", "emu"]) == manifest
    with pytest.raises(SourceError, match="made with --classes"):
        build_here(valid, tmp_path / "cache")
    (tmp_path / "cache" / manifest.index.name).unlink()
    repair_cache(valid, tmp_path / "cache", jobs=1)
    assert verify_cache(tmp_path / "cache") == []


@pytest.mark.slow
def test_classes_of_the_samples_themselves_are_numbered_as_given(
    tmp_path: Path, write_module: Callable[[str, str], None]
) -> None:
    write_module(
        "labelled_by_test",
        "import numpy as np\n"
        "class Birds:\n"
        "    classes = ['owl', 'jay']\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return np.full((8, 8, 3), i, np.uint8), i % 2\n",
    )
    build_here("labelled_by_test:Birds", tmp_path / "cache", classes=["jay", "kea", "owl"])
    dataset = CachedDataset(tmp_path / "cache")
    assert (dataset.classes, dataset.labels.tolist()) == (("jay", "kea", "owl"), [2, 0, 2, 0])
    with pytest.raises(TpucacheError, match="class 'jay', which is none of the 1 given classes: 'owl'"):
        build_here("labelled_by_test:Birds", tmp_path / "other", classes=["owl"])


def test_names_with_leading_zeros_and_several_names_are_kept(valid: Path, tmp_path: Path) -> None:
    rows = [
        f"{path},{'0001' if number % 2 else '0010'},{'b a' if number else ''}"
        for number, path in enumerate(paths_in(valid))
    ]
    write_rows(valid / "t.csv", "path,code,tags", *rows)
    names = tmp_path / "classes.txt"
    names.write_text("0003\n0010\n0001\n")
    source = TableSource(valid / "t.csv", TableOptions(label_cols=("code",)))
    build_here(source, tmp_path / "codes", classes=names)
    assert CachedDataset(tmp_path / "codes").labels.tolist() == [1, 2, 1, 2, 1, 2]
    tags = TableSource(valid / "t.csv", TableOptions(label_cols=("tags",), label_sep=" "))
    build_here(tags, tmp_path / "tags", classes=["a", "c", "b"])
    assert CachedDataset(tmp_path / "tags").labels[:2].tolist() == [[0, 0, 0], [1, 0, 1]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("cat\ndog\ncat\n", "'cat' more than once"), ("\n", "no class names"), (None, "cannot be read"), ("emu", "'cat'")],
)
def test_classes_that_do_not_fit_are_refused(text: str | None, reason: str, valid: Path, tmp_path: Path) -> None:
    names = tmp_path / "classes.txt"
    if text is not None:
        names.write_text(text)
    with pytest.raises(TpucacheError, match=reason):
        build_here(valid, tmp_path / "cache", classes=names)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_cache_like_another_has_its_records_and_classes(train_cache: Path, valid: Path, tmp_path: Path) -> None:
    flags = ["--like", str(train_cache), "--jobs", "1"]
    assert main(["warmup", str(valid), str(tmp_path / "cache"), *flags]) == 0
    made, wanted = Manifest.load(tmp_path / "cache"), Manifest.load(train_cache)
    assert (made.fields, made.classes) == (wanted.fields, wanted.classes)
    assert made.recipe["fit"] == "pad"
    assert Recipe.like(train_cache, variants=2) == Recipe(size=(8, 12), fit="pad", codec="jpeg", quality=80, variants=2)
    test = shutil.copytree(valid / "cat", tmp_path / "test")
    assert main(["warmup", str(test), str(tmp_path / "test_cache"), *flags]) == 0
    assert Manifest.load(tmp_path / "test_cache").classes == ()


@pytest.mark.parametrize(
    ("flags", "status", "reason"),
    [
        (["--size", "224"], 1, "size [8, 12], not [224, 224]"),
        (["--codec", "raw"], 1, "codec jpeg, not raw"),
        (["--labels", "numbers"], 2, "are classes, not numbers"),
        (["--classes", "{train}/../source"], 1, "not a finished cache"),
    ],
)
def test_an_option_that_differs_from_the_other_cache_is_refused(
    flags: list[str],
    status: int,
    reason: str,
    train_cache: Path,
    valid: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [flag.format(train=train_cache) for flag in flags]
    assert main(["warmup", str(valid), str(tmp_path / "cache"), "--like", str(train_cache), *flags]) == status
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_labels_like_those_of_a_cache_of_numbers_are_numbers(valid: Path, tmp_path: Path) -> None:
    for name, step in (("a", 0.5), ("b", 1)):
        rows = [f"{path},{number * step:g}" for number, path in enumerate(paths_in(valid))]
        write_rows(valid / f"{name}.csv", "path,age", *rows)
    flags = ["--label-col", "age", "--jobs", "1"]
    assert main(["warmup", str(valid / "a.csv"), str(tmp_path / "a"), "--size", "8", *flags]) == 0
    assert main(["warmup", str(valid / "b.csv"), str(tmp_path / "b"), "--like", str(tmp_path / "a"), *flags]) == 0
    assert CachedDataset(tmp_path / "b").labels.tolist() == [[0], [1], [2], [3], [4], [5]]
    with pytest.raises(SourceError, match="'cat', which is no number"):
        build_here(valid, tmp_path / "c", labels="numbers")


def test_a_cache_like_one_of_several_values_has_the_same_columns(
    valid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{path},{number}.5,{number}" for number, path in enumerate(paths_in(valid))]
    write_rows(valid / "t.csv", "path,age,the size", *rows)
    flags, swapped = (
        ["--label-col", "age", "--label-col", "the size"],
        ["--label-col", "the size", "--label-col", "age"],
    )
    build_here(TableSource(valid / "t.csv", TableOptions(label_cols=("age", "the size"))), tmp_path / "a")
    command = ["warmup", str(valid / "t.csv"), str(tmp_path / "b"), "--like", str(tmp_path / "a"), "--jobs", "1"]
    assert main([*command, *swapped]) == 2
    assert "not the size, age: give --label-col age --label-col 'the size', or" in capsys.readouterr().err
    assert main([*command, *flags]) == 0
    assert Manifest.load(tmp_path / "b").value_names == ("age", "the size")


@pytest.mark.parametrize(
    ("made", "given", "reason"),
    [
        (["age", "size"], ["age"], "are the columns age, size, not age"),
        (["age"], ["age", "size"], "a label has 2 numbers, and 1 in "),
        (["tags", "|"], ["kind"], "a label is one class, and several classes in .*--labels multilabel if each has one"),
        (["tags", "|"], ["age"], "a label is one class, and several classes in "),
        (["age"], ["kind"], "'a', which is no number"),
        (["kind"], ["tags", "|"], "a label is several classes, and one class in "),
    ],
    ids=str,
)
def test_labels_of_another_form_than_those_of_the_other_cache_are_refused(
    made: list[str],
    given: list[str],
    reason: str,
    valid: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [f"{path},{number + 0.5},{number * 2.5},a,a|b" for number, path in enumerate(paths_in(valid))]
    write_rows(valid / "t.csv", "path,age,size,kind,tags", *rows)

    def flags(columns: list[str]) -> list[str]:
        named = [flag for name in columns if name != "|" for flag in ("--label-col", name)]
        return [*named, *(["--label-sep", "|"] if "|" in columns else []), "--jobs", "1"]

    other, table = str(tmp_path / "other"), str(valid / "t.csv")
    assert main(["warmup", table, other, "--size", "8", *flags(made)]) == 0
    assert main(["warmup", table, str(tmp_path / "new"), "--like", other, *flags(given)]) in (1, 2)
    assert re.search(reason, capsys.readouterr().err.replace("\n", " "))
    assert not (tmp_path / "new").exists()
    if "several classes in " in reason and given == ["kind"]:
        options = [*flags(given), "--labels", "multilabel"]
        assert main(["warmup", table, str(tmp_path / "asked"), "--like", other, *options]) == 0
        assert CachedDataset(tmp_path / "asked").labels[0].tolist() == [1, 0]


@pytest.mark.slow
def test_caches_that_do_not_match_are_told_apart_with_advice(
    train_cache: Path, valid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--run", str(tmp_path / "run"), "--backend", "eager", "--epochs", "1", "--batch-size", "8"]
    for number, options in enumerate([{}, {"classes": train_cache}]):
        cache = tmp_path / f"cache{number}"
        build_here(valid, cache, **options)
        assert main(["train", str(train_cache), "--valid", str(cache), *run]) == 2
        assert f"--like {train_cache}" in capsys.readouterr().err


@pytest.mark.slow
def test_patterns_choose_samples_and_their_classes(photos: Path, tmp_path: Path) -> None:
    command = ["warmup", str(photos), str(tmp_path / "cache"), "--size", "8", "--jobs", "1"]
    assert main([*command, "--include", "cat/*", "--include", "dog/*", "--exclude", "*0.jpg"]) == 0
    dataset = CachedDataset(tmp_path / "cache")
    assert dataset.classes == ("cat", "dog")
    assert len(dataset) == sum(not path.name.endswith("0.jpg") for path in photos.glob("[cd]*/*.jpg"))
    (tmp_path / "cache" / dataset.manifest.index.name).unlink()
    repair_cache(photos, tmp_path / "cache", jobs=1)
    assert main(["verify", str(tmp_path / "cache")]) == 0
    with pytest.raises(SourceError, match=r"none of the 150 samples .* such as 'cat/0000.jpg'"):
        select_source(FolderSource(photos), include=["*.png"]).list()


@pytest.mark.slow
def test_a_limit_is_spread_over_the_classes_and_a_larger_one_adds(photos: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    build_here(select_source(open_source(photos), limit=20), cache)
    few = labels_of(cache)
    assert (len(few), set(few.values())) == (20, {"cat", "dog", "emu"})
    build_here(select_source(open_source(photos), limit=40), cache)
    more = labels_of(cache)
    assert len(more) == 40
    assert few.items() <= more.items()
    build_here(photos, cache)
    assert len(labels_of(cache)) == 150
    with pytest.raises(UsageError, match="limit is at least 1"):
        select_source(open_source(photos), limit=0)


@pytest.mark.slow
def test_an_interrupted_run_continues_only_with_the_same_choice(photos: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    part = select_source(open_source(photos), limit=30)

    with pytest.raises(Stopped):
        build_here(part, cache, on_progress=stop_after(0))
    for other in (select_source(open_source(photos), limit=31), open_source(photos)):
        with pytest.raises(SourceError, match=r"was started with --limit 30, now (31|not given): give"):
            build_here(other, cache)
    assert build_here(part, cache).samples == 30


@pytest.mark.slow
def test_an_augmentation_that_fails_names_the_file_and_can_be_skipped(
    valid: Path, tmp_path: Path, write_module: Callable[[str, str], None]
) -> None:
    write_module(
        "picky_by_test",
        "def picky(image, generator):\n"
        "    if 0 < image.std() < 65 and image[0, 0, 0] % 2: raise ValueError('odd')\n"
        "    return image\n",
    )
    recipe = Recipe(size=8, variants=1, augment="picky_by_test:picky")
    clean = build_here(valid, tmp_path / "clean")
    dataset = CachedDataset(tmp_path / "clean")
    images = [image.numpy() for image, _ in dataset]
    odd = [
        path for path, image in zip(dataset.paths, images, strict=True) if 0 < image.std() < 65 and image[0, 0, 0] % 2
    ]
    assert 0 < len(odd) < clean.samples
    with pytest.raises(SampleError, match=f"'{odd[0]}': the augmentation fails .*ValueError: odd"):
        build_here(valid, tmp_path / "cache", recipe)
    shutil.rmtree(tmp_path / "cache")
    manifest = build_here(valid, tmp_path / "cache", recipe, on_error="skip")
    assert [skipped.path for skipped in manifest.skipped] == odd
    with pytest.raises(SampleError, match="so it cannot be skipped"):
        build_here(valid, tmp_path / "clean", recipe, on_error="skip")
