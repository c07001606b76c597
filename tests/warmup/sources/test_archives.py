"""Archives as sources: the same samples as the folder that they were made of, read where they are."""

from __future__ import annotations

import os
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from made import build_here, digests, write_photos, write_rows
from stops import Stopped, stop_after

from tpucache import Recipe, build_cache
from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.store.manifest import Manifest
from tpucache.warmup.sources import TableOptions, label_source, open_source
from tpucache.warmup.sources.archives import list_zip, zip_file


def _pack(folder: Path, target: Path, top: str = "") -> Path:
    """Write the files of a folder into an archive, below a folder `top` of it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [os.path.join(top, path.relative_to(folder)) for path in files]
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "w") as archive:
            for number, (path, name) in enumerate(zip(files, names, strict=True)):
                archive.write(path, name, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[number % 2])
    else:
        with tarfile.open(target, "w") as archive:
            for path, name in zip(reversed(files), reversed(names), strict=True):
                archive.add(path, name)
    return target


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("few") / "train", 12, size=(20, 16))


def _records(manifest: Manifest) -> list[str]:
    return [shard.records_sha256 for shard in manifest.shards]


@pytest.mark.slow
def test_records_from_archives_are_those_from_the_folder_and_nothing_is_unpacked(few, tmp_path):
    recipe = Recipe(size=8, variants=1, augment="flip")
    expected = _records(build_here(few, tmp_path / "folder", recipe))
    for name, top in (("a.zip", "."), ("a.tar", "outer/train")):
        archive = _pack(few, tmp_path / name, top)
        assert _records(build_cache(archive, tmp_path / f"{name}-cache", recipe, jobs=2)) == expected
    assert len([*tmp_path.iterdir()]) == 5


def test_several_archives_are_one_source_and_names_begin_with_theirs(few, tmp_path):
    for name in ("part-2.zip", "part-1.zip"):
        _pack(few, tmp_path / name, "train")
    listing = open_source(tmp_path / "part-*.zip").list()
    assert listing.samples[0].path == "part-1.zip/train/cat/0000.jpg"


def test_a_folder_of_an_archive_is_a_source(few, tmp_path):
    _pack(few, tmp_path / "a.zip", "data/train")
    assert [s.path for s in open_source(tmp_path / "a.zip" / "data" / "train" / "dog").list().samples] == [
        "0001.jpg", "0004.jpg", "0007.jpg", "0010.jpg",
    ]  # fmt: skip
    with pytest.raises(SourceError, match="holds no files"):
        open_source(tmp_path / "a.zip" / "none").list()


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_table_in_an_archive_or_beside_it(few, tmp_path, kind):
    folder = tmp_path / "data"
    shutil.copytree(few, folder / "images")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.jpg"))
    rows = [f"{name},{'ab'[number % 2]},{number}" for number, name in enumerate(names)]
    write_rows(folder / "train.csv", "file,kind,age", *rows, "images/gone.jpg,a,3")
    archive = _pack(folder, tmp_path / f"data.{kind}")
    shutil.copy(folder / "train.csv", tmp_path / "beside.csv")
    options = TableOptions(label_cols=("kind",))
    beside = TableOptions(label_cols=("kind",), root=archive)
    inside = open_source(archive / "train.csv", options)
    for source in (inside, open_source(archive, options), open_source(tmp_path / "beside.csv", beside)):
        listing = label_source(source, "auto").list()
        assert listing.classes == ("a", "b")
        assert list(listing.columns["age"]) == [*range(12), 3]
        loader = pickle.loads(pickle.dumps(source))
        for sample in listing.samples[:-1]:
            assert loader.load(sample).fields["image"] == (folder / sample.path).read_bytes()
        with pytest.raises(SampleError, match="is not in"):
            loader.load(listing.samples[-1])
    _pack(folder, tmp_path / "two.zip")
    with zipfile.ZipFile(tmp_path / "two.zip", "a") as file:
        file.writestr("test.csv", "file\n")
    with pytest.raises(UsageError, match=r"holds .*test\.csv.*: name one"):
        open_source(tmp_path / "two.zip", options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_a_stopped_run_continues_to_the_same_bytes_and_notices_another_archive(photos, tmp_path, name):
    archive = _pack(photos, tmp_path / name)
    build_here(archive, tmp_path / "whole")
    with pytest.raises(Stopped):
        build_here(archive, tmp_path / "parts", on_progress=stop_after(40))
    shutil.copytree(tmp_path / "parts", tmp_path / "changed")
    build_here(archive, tmp_path / "parts")
    assert digests(tmp_path / "whole") == digests(tmp_path / "parts")
    few = tmp_path / "few"
    shutil.copytree(photos / "cat", few / "cat")
    _pack(few, archive)
    with pytest.raises(SourceError, match="gone"):
        build_here(archive, tmp_path / "changed")


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_an_archive_that_changes_during_a_run_is_noticed(few, tmp_path, name):
    source = open_source(_pack(few, tmp_path / name))
    samples = source.list().samples
    _pack(few, tmp_path / name, "elsewhere")
    for sample in samples[1:-1]:
        with pytest.raises(SampleError, match=r"the archive, which has changed|is damaged"):
            source.load(sample)


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_an_archive_is_opened_again_after_a_new_listing(few, tmp_path, name):
    archive = _pack(few, tmp_path / name)
    source = open_source(archive)
    samples = source.list().samples
    source.load(samples[0])
    other = _pack(few, tmp_path / f"other{archive.suffix}", "elsewhere")
    other.replace(archive)
    assert source.load(source.list().samples[0])


def test_links_of_a_tar_are_the_files_that_they_name(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(b"one")
    os.link(tmp_path / "cat" / "1.jpg", tmp_path / "cat" / "2.jpg")
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog" / "3.jpg").symlink_to("../cat/1.jpg")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "cat", "cat")
        archive.add(tmp_path / "dog", "dog")
    source = open_source(tmp_path / "a.tar")
    assert {s.path: source.load(s).fields["image"] for s in source.list().samples} == dict.fromkeys(
        ("cat/1.jpg", "cat/2.jpg", "dog/3.jpg"), b"one"
    )


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_unusual_names_of_a_tar(tmp_path, form):
    names = [f"{'deep' * 20}/{'long' * 12}.jpg", "caf\u00e9/\u732b.jpg"]
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as archive:
        for name in names:
            (tmp_path / "x").write_text(name)
            archive.add(tmp_path / "x", name)
    source = open_source(tmp_path / "a.tar")
    assert {s.path: source.load(s).fields["image"].decode() for s in source.list().samples} == dict(
        zip(names, names, strict=True)
    )


@pytest.mark.parametrize("count", [3, 30_000])
def test_the_directory_of_a_zip_is_read_with_few_answers(tmp_path, count):
    path, asked = tmp_path / "a.zip", []
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(count):
            archive.writestr(f"a-folder-with-a-long-name/{number:06}.jpg", b"x" * (number % 50))
    data = path.read_bytes()
    opened = zip_file(lambda start, stop: asked.append(start) or data[start:stop], len(data))
    listed = list_zip(opened, "a.zip", "a.zip", lambda _: None)
    assert [(each.name, each.offset, each.bytes) for each in listed] == [
        (info.filename, info.header_offset, info.file_size) for info in archive.infolist()
    ]
    assert len(asked) <= (1 if count == 3 else 3)


def test_a_zero_byte_in_a_name_of_a_zip_is_refused(few, tmp_path):
    path = _pack(few, tmp_path / "a.zip")
    name = zipfile.ZipFile(path).namelist()[0].encode()
    path.write_bytes(path.read_bytes().replace(name, name[:-1] + b"\0"))
    with pytest.raises(SourceError, match="has a zero byte in its name"):
        open_source(path).list()


def test_names_of_a_zip_in_utf_8_are_read_without_the_flag_that_says_so(tmp_path):
    name = "caf\u00e9/1.jpg"
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(name, b"x")
    flagged = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(flagged.replace(b"\x00\x08\x00\x00", b"\x00\x00\x00\x00"))
    source = open_source(tmp_path / "a.zip")
    (sample,) = source.list().samples
    assert (sample.path, source.load(sample).fields["image"]) == (name, b"x")
