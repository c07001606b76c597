"""Class folders: what is one, on disk and in archives alike."""

from __future__ import annotations

import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from made import build_here, png, write

from tpucache.errors import SourceError, UsageError
from tpucache.store.cache import Cache
from tpucache.warmup.sources import TableOptions, label_source, open_source, select_source

KINDS = ("folder", "zip", "tar")


def _make(tmp_path: Path, kind: str, *names: str) -> Path:
    """Return a folder `data`, or an archive of it, with these files and, where a name ends with a slash, folders."""
    root = tmp_path / "data"
    for level, name in enumerate(names):
        if name.endswith("/"):
            (root / name).mkdir(parents=True)
        else:
            write(root / name, png(level) if name.endswith(".png") else b"text")
    if kind == "folder":
        return root
    if kind == "tar":
        with tarfile.open(tmp_path / "data.tar", "w") as tar:
            tar.add(root, "data")
        return tmp_path / "data.tar"
    return Path(shutil.make_archive(str(tmp_path / "data"), "zip", tmp_path, "data"))


def _found(source: Path) -> tuple[tuple[str, ...], dict[str, int | None]]:
    listing = open_source(source).list()
    return listing.classes, {Path(sample.path).name: sample.label for sample in listing.samples}


JUNK = ("@eaDir", "$RECYCLE.BIN", "__MACOSX", ".ipynb_checkpoints", "lost+found", "System Volume Information")
TWO = {"1.png": "cat", "2.png": "dog"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("names", "found", "text"),
    [
        *((f"{folder}/1.png", {"1.png": "cat"}, "") for folder in ("cat", "animals/cat", "animals/animals/cat")),
        ("cat/1.png|cat/2020/2.png", {"1.png": "cat", "2.png": "cat"}, ""),
        ("1.png|out/", {"1.png": None}, ""),
        ("b/b/cat/1.png|b/b/dog/2.png", TWO, "all images are in b/b, whose folders are the classes"),
        ("cat/1.png|dog/2.png|notes/a.txt", TWO, "folders without an image are not classes: 'notes'"),
        *(
            (f"cat/1.png|dog/2.png|{name}/3.png|cat/{name}/4.png|{name}/deep/5.png", TWO, f"made by systems: {name!r}")
            for name in JUNK
        ),
    ],
)
def test_folders_of_images_are_classes_and_what_is_passed_over_is_named(
    tmp_path: Path, kind: str, names: str, found: dict[str, str | None], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    classes, labels = _found(_make(tmp_path, kind, *names.split("|")))
    assert {name: None if label is None else classes[label] for name, label in labels.items()} == found
    assert set(classes) == {*found.values()} - {None}
    assert text in caplog.text


@pytest.mark.parametrize(("names", "classes"), [("cat dog", ("cat", "dog")), ("part-0 part-1", ())])
def test_archives_that_no_number_tells_apart_are_classes(tmp_path: Path, names: str, classes: tuple[str, ...]) -> None:
    for name in names.split():
        write(tmp_path / name / "1.mask.png", png(1))  # no mask, as nothing else is called so
        shutil.make_archive(str(tmp_path / name), "tar", tmp_path / name)
    assert build_here(tmp_path / "*.tar", tmp_path / "cache").classes == classes
    with pytest.raises(UsageError, match="is a source without a table, which has no --mask-col"):
        open_source(tmp_path / "*.tar", TableOptions(mask_col="mask")).list()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_class_folder_keeps_its_number_and_is_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = _make(tmp_path, kind, "ant/1.png", "bee/", "cat/deep/", "dog/2.png")
    assert _found(source) == (("ant", "bee", "cat", "dog"), {"1.png": 0, "2.png": 3})
    assert "empty folders are classes without a sample, which keep their numbers: 'bee', 'cat'" in caplog.text
    manifest = build_here(source, tmp_path / "cache")
    assert manifest.classes == ("ant", "bee", "cat", "dog")
    assert manifest.statistics.class_counts == (1, 0, 0, 1)


def test_files_of_systems_are_named_and_hidden_ones_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _found(_make(tmp_path, "folder", "cat/1.png", "dog/2.png", "cat/Thumbs.db", "cat/.DS_Store"))
    assert "made by systems: 'Thumbs.db'" in caplog.text
    assert ".DS_Store" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("names", "train", "held_out"),
    [
        (("train/cat/1.png", "train/dog/2.png", "val/cat/3.png"), "train", ["val"]),
        (("Train/1.png", "Validation/2.png", "TEST/3.png"), "Train", ["TEST", "Validation"]),
        (("training/cat/1.png", "dev/cat/2.png", "extra/cat/3.png"), "training", ["dev"]),
        (("images/train/1.png", "images/test/2.png", "labels/train/1.txt"), "images/train", ["images/test"]),
        (("training_set/cat/1.png", "test_set/cat/2.png"), "training_set", ["test_set"]),
        (("train_images/1.png", "test_images/2.png"), "train_images", ["test_images"]),
        (("seg_train/cat/1.png", "seg_test/cat/2.png"), "seg_train", ["seg_test"]),
        (("train2017/1.png", "val2017/2.png"), "train2017", ["val2017"]),
        (("train/1.png", "test1/2.png"), "train", ["test1"]),
        (("Training/1.png", "PublicTest/2.png", "PrivateTest/3.png"), "Training", ["PublicTest", "PrivateTest"]),
        (("trainA/1.png", "trainB/2.png", "testA/3.png", "testB/4.png"), "trainA", ["testA", "testB"]),
    ],
)
def test_parts_of_a_data_set_are_refused_with_the_command_for_each(
    tmp_path: Path, kind: str, names: tuple[str, ...], train: str, held_out: list[str]
) -> None:
    source = _make(tmp_path, kind, *names)
    with pytest.raises(SourceError) as caught:
        build_here(source, tmp_path / "cache")
    where = source if kind == "folder" else source / "data"
    assert f"`warmup {where / train} CACHE/{Path(train).name} …`" in str(caught.value)
    for part in held_out:
        command = f"`warmup {where / part} CACHE/{Path(part).name} --like CACHE/{Path(train).name}`"
        assert command in str(caught.value)
    assert not (tmp_path / "cache").exists()
    build_here(where / train, tmp_path / "train")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "names",
    [
        ("images", "masks"),
        ("JPEGImages", "SegmentationClass"),
        ("train", "train_masks"),
        ("images", "segmentations"),
        ("leftImg8bit", "gtFine"),
        ("ISIC2018_Task1-2_Training_Input", "ISIC2018_Task1_Training_GroundTruth"),
    ],
)
def test_images_and_their_masks_are_no_classes(tmp_path: Path, kind: str, names: tuple[str, str]) -> None:
    source = _make(tmp_path, kind, *(f"{name}/1.png" for name in names))
    with pytest.raises(SourceError, match=f"holds the folders {names[0]} and {names[1]}, which are images and their"):
        build_here(source, tmp_path / "cache")
    build_here(source, tmp_path / "cache", classes=names)


@pytest.mark.parametrize(
    ("names", "masks"),
    [
        ("Original/1.png|Original/2.png|Ground Truth/1.png|Ground Truth/2.png", "Original and Ground Truth"),
        ("img/1.png|img/2.png|masks_human/1.png|masks_human/2.png", "img and masks_human"),
        ("A/1.jpg|A/2.jpg|B/in/1.png|B/in/2.png", "A and B"),
        ("cat/1.png|cat/2.png|dog/1.png|dog/2.png", ""),
        ("cat/1.jpg|cat/2.jpg|dog/3.png|dog/4.png", ""),
    ],
)
def test_two_folders_whose_files_pair_up_are_images_and_masks(tmp_path: Path, names: str, masks: str) -> None:
    doubt = open_source(_make(tmp_path, "folder", *names.split("|"))).list().doubt
    assert f"holds the folders {masks}, which" in doubt if masks else not doubt


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("a/1 a/1_mask a/2 a/2_mask", "called as the other half, with '_mask' added"),
        ("mask_1 1 mask_2 2", "called as the other half, with 'mask_' added"),
        ("1 1_mask 2 2_seg 3", ""),
        ("HR/1 HR/2 LR/1 LR/2", "the folders 'HR', 'LR' become classes, and their files have the same names"),
        ("part1/1 part2/2", "the folders 'part1', 'part2' become classes: if they are pieces"),
        ("cat1/1 cat2/2", ""),
        ("Cat/1 cat/2", "'Cat' and 'cat' are different classes"),
    ],
)
def test_what_may_be_no_class_is_told_of(
    tmp_path: Path, names: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    label_source(open_source(_make(tmp_path, "folder", *(f"{name}.png" for name in names.split()))), "auto").list()
    assert told in caplog.text if told else not caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_images_and_their_masks_in_a_folder_for_each_image_are_no_class(tmp_path: Path, kind: str) -> None:
    names = [f"id{number}/{name}/{number}.png" for number in range(2) for name in ("images", "masks")]
    source = _make(tmp_path, kind, *names)
    with pytest.raises(SourceError, match="id0 holds the folders images and masks, which are images and their masks"):
        build_here(source, tmp_path / "cache")


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_data_set_in_class_folders_are_refused(tmp_path: Path, kind: str) -> None:
    names = ("bottle/train/good/1.png", "bottle/test/good/2.png", "bottle/ground_truth/bad/2.png", "cable/train/3.png")
    source = _make(tmp_path, kind, *names)
    with pytest.raises(SourceError, match="bottle holds the folders train, test, which are parts of a data set"):
        build_here(source, tmp_path / "cache")
    chosen = select_source(open_source(source), include=["*/train/*"])
    build_here(chosen, tmp_path / "cache", classes=["bottle", "cable"])
    assert len(Cache.open(tmp_path / "cache").samples.paths) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_classes_that_are_called_as_parts_are_used_where_they_are_given(tmp_path: Path, kind: str) -> None:
    source = _make(tmp_path, kind, "train/1.png", "test/2.png", "bus/3.png")
    build_here(source, tmp_path / "cache", classes=["bus", "test", "train"])
    cache = Cache.open(tmp_path / "cache")
    assert cache.manifest.classes == ("bus", "test", "train")
    labels = cache.samples.labels
    assert labels is not None
    assert {Path(path).name: int(label) for path, label in zip(cache.samples.paths, labels, strict=True)} == {
        "1.png": 2,
        "2.png": 1,
        "3.png": 0,
    }


@pytest.mark.parametrize(
    "names",
    [
        ("train/1.png", "bus/2.png"),
        ("test/1.png", "val/2.png"),
        ("train/1.png",),
        ("bullet_train/1.png", "test_tube/2.png"),
        ("mask/1.png", "no_mask/2.png"),
        ("with_mask/1.png", "without_mask/2.png"),
        ("bus/train/1.png", "bus/labels_seen/2.png", "car/test/3.png"),
    ],
)
def test_one_such_name_alone_is_a_class(tmp_path: Path, names: tuple[str, ...]) -> None:
    listing = open_source(_make(tmp_path, "folder", *names)).list()
    assert listing.doubt == ""


@pytest.mark.parametrize("inner", ["cat", "emu"])
def test_classes_with_the_same_folders_in_each_are_told_of(
    tmp_path: Path, inner: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("color/cat/1.png", "color/dog/2.png", "grey/cat/1.png", "grey/dog/2.png", f"grey/{inner}/3.png")
    doubt = open_source(_make(tmp_path, "folder", *names)).list().doubt
    told = "'color', 'grey' have the folders 'cat', 'dog' each: if those are the classes"
    assert told in (doubt if inner == "cat" else caplog.text)
    assert bool(doubt) is (inner == "cat")


def _meaning(source: Path) -> object:
    """Return what a source means, or that it is refused."""
    try:
        opened = open_source(source)
        listing = opened.list()
    except SourceError as error:
        return re.sub(r"'.*?'|\S*/\S*", "", str(error))
    top = "data/" * source.is_file()
    found = [(one.path.removeprefix(top), one.label, one.bytes, opened.load(one)) for one in listing.samples]
    return listing.classes, bool(listing.doubt), sorted(found, key=str), list(listing.columns)


_PARTS = ("cat", "dog", "train", "val", "@eaDir", "data", ".hidden", "a b")


@pytest.mark.parametrize("seed", range(40))
def test_random_folders_mean_the_same_on_disk_and_in_archives_that_list_files_alone(seed: int, tmp_path: Path) -> None:
    random = np.random.RandomState(seed)
    names = []
    for number in range(random.randint(1, 7)):
        folder = "".join(f"{_PARTS[place]}/" for place in random.randint(0, len(_PARTS), random.randint(0, 4)))
        names.append(f"{folder}{number}.{'png' if random.rand() < 0.8 else 'txt'}")
        names += [f"{folder}empty{number}/"] if random.rand() < 0.2 else []
        names += [f"{folder}{number}.cls"] if random.rand() < 0.2 and names[-1].endswith(".png") else []
    folder = _make(tmp_path, "folder", *names)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive, tarfile.open(tmp_path / "data.tar", "w") as tar:
        for name in names:
            archive.writestr(f"data/{name}", b"" if name.endswith("/") else (folder / name).read_bytes())
            tar.add(folder / name, f"data/{name}", recursive=False)
    found = [_meaning(folder), _meaning(tmp_path / "data.zip"), _meaning(tmp_path / "data.tar")]
    assert found == [found[0]] * 3
