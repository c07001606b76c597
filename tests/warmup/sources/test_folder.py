"""The folder source: what counts as a sample, in which order, with which label."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from tpucache.errors import SampleError, SourceError
from tpucache.warmup.sources import FolderSource, Sample, open_source
from tpucache.warmup.sources.source import Item


def _touch(root: Path, *names: str | bytes) -> None:
    for name in names:
        path = Path(os.fsdecode(os.fsencode(root) + b"/" + os.fsencode(name)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name))


def _paths(root: Path) -> list[str]:
    return [sample.path for sample in FolderSource(root).list().samples]


def test_files_of_one_folder_stay_together(tmp_path: Path) -> None:
    _touch(tmp_path, "a/1.jpg", "a b/1.jpg", "a-b/1.jpg", "a/2.jpg")
    assert _paths(tmp_path) == ["a/1.jpg", "a/2.jpg", "a b/1.jpg", "a-b/1.jpg"]


@pytest.mark.parametrize(
    "name",
    ["with space.jpg", "caf\u00e9.jpg", "\u732b.jpg", "two\nlines.jpg", 'quo"te.jpg', b"latin-\xe9.jpg"],
    ids=ascii,
)
def test_unusual_names_are_listed_loaded_and_pickled(tmp_path: Path, name: str | bytes) -> None:
    try:
        _touch(tmp_path, b"cl\xc3\xa4ss \n/" + os.fsencode(name))
    except OSError:
        pytest.skip("this filesystem has no such names")
    source = pickle.loads(pickle.dumps(FolderSource(tmp_path)))
    listing = source.list()
    (sample,) = listing.samples
    assert listing.classes == ("cl\u00e4ss \n",)
    assert os.fsencode(sample.path) == b"cl\xc3\xa4ss \n/" + os.fsencode(name)
    assert source.load(pickle.loads(pickle.dumps(sample))) == Item({"image": b"cl\xc3\xa4ss \n/" + os.fsencode(name)})


@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_links_in_circles_end(tmp_path: Path, target: str) -> None:
    _touch(tmp_path, "a/deep/1.jpg", "b/1.jpg")
    (tmp_path / "a" / "deep" / "round").symlink_to(target)
    assert _paths(tmp_path) == ["a/deep/1.jpg", "b/1.jpg"]


def test_links_to_folders_and_files_elsewhere_are_followed(tmp_path: Path) -> None:
    _touch(tmp_path, "elsewhere/1.jpg", "single.jpg")
    root = tmp_path / "root"
    (root / "b").mkdir(parents=True)
    (root / "a").symlink_to(tmp_path / "elsewhere")
    (root / "b" / "2.jpg").symlink_to(tmp_path / "single.jpg")
    assert _paths(root) == ["a/1.jpg", "b/2.jpg"]
    assert FolderSource(root).load(Sample(0, "a/1.jpg", 0)) == Item({"image": b"elsewhere/1.jpg"})


def test_images_beside_class_folders_are_refused(tmp_path: Path) -> None:
    _touch(tmp_path, "cat/1.jpg", "stray.jpg")
    with pytest.raises(SourceError, match=r"stray\.jpg.*'cat'"):
        FolderSource(tmp_path).list()


@pytest.mark.parametrize("names", [(), ("readme.txt", "a/data.csv"), (".hidden.jpg",)], ids=str)
def test_a_folder_without_images_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    _touch(tmp_path, *names)
    with pytest.raises(SourceError, match="holds no images"):
        FolderSource(tmp_path).list()


def test_a_file_that_is_gone_and_a_link_to_nothing_are_listed_and_do_not_load(tmp_path: Path) -> None:
    _touch(tmp_path, "a/1.jpg")
    (tmp_path / "a" / "2.jpg").symlink_to(tmp_path / "nowhere.jpg")
    source = FolderSource(tmp_path)
    samples = source.list().samples
    assert [sample.path for sample in samples] == ["a/1.jpg", "a/2.jpg"]
    (tmp_path / "a" / "1.jpg").unlink()
    for sample in samples:
        with pytest.raises(SampleError, match=r"cannot be read.*No such file") as caught:
            source.load(sample)
        assert caught.value.path == sample.path


def test_what_is_no_regular_file_is_a_sample_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    source = FolderSource(tmp_path)
    with pytest.raises(SampleError, match="not a regular file"):
        source.load(source.list().samples[0])


def test_a_source_stays_the_same_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _touch(tmp_path, "photos/a/1.jpg")
    monkeypatch.chdir(tmp_path)
    source = open_source("photos")
    monkeypatch.chdir("/")
    assert source.load(source.list().samples[0]) == Item({"image": b"photos/a/1.jpg"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a/trian", "{0}/a/trian does not exist in {0}/a: did you mean train?"),
        ("a/other", "{0}/a/other does not exist in {0}/a: check its name"),
        ("b/c/train", "{0}/b/c/train does not exist in {0}: check its name"),
        ("a/file.rar", "{0}/a/file.rar is a file of an unknown kind: give a folder of images or a .csv"),
    ],
)
def test_a_missing_source_is_an_error_that_says_where_it_was_looked_for(tmp_path: Path, name: str, said: str) -> None:
    _touch(tmp_path, "a/train/1.jpg", "a/file.rar")
    with pytest.raises(SourceError) as raised:
        open_source(tmp_path / name)
    assert str(raised.value) == said.format(tmp_path) + "; `tpucache warmup --help` names the other kinds of sources"


def test_files_of_other_types_are_counted_by_suffix(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("1.JPG", "2.PSD", "3.psd", "4.CSV", "README", "1.2.840.113619", "x.tar.gz", "y.a b"):
        _touch(tmp_path, f"a/{name}")
    assert FolderSource(tmp_path).list().left_out == {".psd": 2, ".csv": 1, ".gz": 1, "(no suffix)": 3}
    assert "labels of these images in 'a/4.CSV', give this table as the source" in caplog.text


def test_a_pattern_of_images_is_what_it_matches_in_the_folder_above_its_first_wildcard(tmp_path: Path) -> None:
    _touch(tmp_path, "ant/1.jpg", "ant/2.png", "bee/3.jpg", "bee/deep/4.jpg", ".hidden/5.jpg", "bee/notes.txt")
    listing = open_source(str(tmp_path / "*" / "*.jpg")).list()
    assert [(sample.path, sample.label) for sample in listing.samples] == [("ant/1.jpg", 0), ("bee/3.jpg", 1)]
    assert listing.classes == ("ant", "bee")
    source = pickle.loads(pickle.dumps(open_source(tmp_path / "ant" / "*.{jpg,png}")))
    assert [(each.path, each.label) for each in source.list().samples] == [("1.jpg", None), ("2.png", None)]
    assert source.load(source.list().samples[1]) == Item({"image": b"ant/2.png"})


def test_a_cache_is_no_source_and_the_error_says_what_to_do_with_it(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is a finished cache: train, bench and CachedDataset read it"):
        open_source(cache)
    (tmp_path / "unfinished" / ".warmup").mkdir(parents=True)
    with pytest.raises(SourceError, match="is a finished cache"):
        open_source(tmp_path / "unfinished")
    _touch(tmp_path / "photos", "manifest.json", "1.jpg")  # of images, and something else's manifest
    assert [sample.path for sample in open_source(tmp_path / "photos").list().samples] == ["1.jpg"]
