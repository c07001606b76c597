"""Sources at URLs give what they give from a disk, ask for what is needed, and take no network for a broken sample."""

from __future__ import annotations

import gc
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

sys.path.append(str(Path(__file__).parents[2] / "store" / "remote"))  # for servers.py

from made import build_here, write_records
from servers import Server
from stops import Stopped, stop_after

from tpucache import Recipe, SourceError, StoreError, UsageError, build_cache
from tpucache.cli import main
from tpucache.errors import SampleError
from tpucache.store.remote.cache import clear_kept, copy_files, list_kept
from tpucache.warmup.sources import open_source

_RECIPE = Recipe(size=16)


@pytest.fixture(autouse=True)
def own_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TPUCACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    yield
    fsspec.filesystem("memory").store.clear()


def put(folder: Path, name: str) -> str:
    for path in folder.rglob("*.*"):
        place = f"/{name}/{path.relative_to(folder).as_posix()}"
        fsspec.filesystem("memory").pipe_file(place, path.read_bytes())
    return f"memory://{name}"


@pytest.fixture
def bucket(photos: Path) -> str:
    return put(photos, "photos")


@pytest.fixture
def zipped(photos: Path, tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "web").mkdir()
    with zipfile.ZipFile(tmp_path / "web" / "photos.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(photos.rglob("*.*")):
            file.write(path, path.relative_to(photos).as_posix())
    server = Server(tmp_path / "web")
    yield server
    server.close()


def records(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.iterdir() if path.name != "manifest.json"}


def test_a_bucket_gives_the_cache_of_the_same_folder(bucket: str, photos: Path, tmp_path: Path) -> None:
    build_here(photos, tmp_path / "own", _RECIPE)
    build_here(bucket, tmp_path / "cache", _RECIPE)
    assert records(tmp_path / "cache") == records(tmp_path / "own")


def test_a_connection_that_breaks_is_tried_again_and_a_network_that_is_gone_is_no_broken_sample(
    zipped: Server, photos: Path, tmp_path: Path
) -> None:
    zipped.fault = lambda name, number: "cut" if number % 5 == 0 else None
    build_here(photos, tmp_path / "own", _RECIPE)
    build_cache(f"{zipped.url}/photos.zip", tmp_path / "cache", _RECIPE, jobs=2)
    assert records(tmp_path / "cache") == records(tmp_path / "own")
    source = open_source(f"{zipped.url}/photos.zip")
    sample = source.list().samples[0]
    zipped.fault = lambda name, number: "503"
    with pytest.raises(StoreError, match="Check the URL and the network"):
        source.load(sample)


def test_a_build_that_is_continued_does_not_list_again(bucket: str, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        build_here(bucket, tmp_path / "cache", _RECIPE, on_progress=stop_after(-1))
    before = len(open_source(bucket).list().samples)
    first = open_source(bucket).list().samples[0].path
    files = fsspec.filesystem("memory")
    files.copy(f"/photos/{first}", f"/photos/{first}.jpg")
    counts = [build_here(bucket, tmp_path / "cache", _RECIPE).samples for _ in range(2)]
    assert counts == [before, before + 1]  # a finished one is compared with what is there now


def test_a_file_that_is_gone_is_a_broken_sample(bucket: str) -> None:
    source = open_source(bucket)
    sample = source.list().samples[0]
    fsspec.filesystem("memory").rm(f"/photos/{sample.path}")
    with pytest.raises(SampleError, match="is no longer at memory://photos"):
        source.load(sample)


def write_rows(path: Path, label: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"ids": [[1]] * 2, "label": [label] * 2}), path, compression=None)


def labels_at(url: str | Path) -> list[Any]:
    return [(sample.path, sample.label) for sample in open_source(url).list().samples]


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "tables")
    yield server
    server.close()


@pytest.mark.parametrize("names", ["train-0000{}.parquet", "train.tfrecord-0000{}-of-00002", "train-0000{}.tar"])
def test_files_of_samples_are_copied_once_and_give_what_they_give_on_a_disk(
    names: str, tables: Server, tmp_path: Path, photos: Path
) -> None:
    tables.folder.mkdir()
    rows = [{"image": path.read_bytes(), "label": 1} for path in sorted(photos.rglob("*.*"))[:20]]
    for part in range(2):
        path = tables.folder / names.format(part)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows[part::2]), path)
        elif path.suffix == ".tar":
            shutil.make_archive(str(path.with_suffix("")), "tar", photos)
        else:
            write_records(path, *rows[part::2])
    build_here(f"{tables.folder}/{names.format('*')}", tmp_path / "own", _RECIPE)
    url = f"{tables.url}/{names.format('{0..1}')}"
    tables.fault = lambda name, _: "503" if "00001" in name else None
    with pytest.raises(StoreError, match="503"):
        open_source(url)
    tables.fault = lambda *_: None
    build_here(url, tmp_path / "web", _RECIPE)
    open_source(url)
    assert sum(stop - start > 1 for _, start, stop in tables.ranges) == 2
    build_here(f"{put(tables.folder, 'sets')}/{names.format('*')}", tmp_path / "bucket", _RECIPE)
    assert records(tmp_path / "own") == records(tmp_path / "web") == records(tmp_path / "bucket")


def test_a_table_at_a_url_names_files_beside_it_also_after_a_stop(tables: Server, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, tables.folder)
    rows = [f"{path.relative_to(photos)},{path.parent.name}" for path in photos.rglob("*.jpg")]
    (tables.folder / "all.csv").write_text("\n".join(["path,label", *rows, "../all.csv,cat", "gone.jpg,cat"]))
    found = [build_here(tables.folder / "all.csv", tmp_path / "local", _RECIPE, on_error="skip")]
    for number, where in enumerate((tables.url, put(tables.folder, "all"))):
        given = f"{where}/all.csv", tmp_path / str(number), _RECIPE
        with pytest.raises(Stopped):
            build_here(*given, on_error="skip", on_progress=stop_after(-1))
        found.append(build_here(*given, on_error="skip"))
    assert found[0].shards == found[1].shards == found[2].shards
    assert [[each.path for each in manifest.skipped] for manifest in found] == [["../all.csv", "gone.jpg"]] * 3


@pytest.mark.parametrize("has_no_version", [False, True])
def test_a_file_that_is_replaced_at_equal_size_is_copied_again(tables: Server, has_no_version: bool) -> None:
    tables.is_weak, sizes, path = has_no_version, set(), tables.folder / "some.parquet"
    for label in (1, 2):
        write_rows(path, label)
        sizes.add(path.stat().st_size)
        assert labels_at(f"{tables.url}/some.parquet") == [("some.parquet#0", label), ("some.parquet#1", label)]
    assert len(sizes) == 1


def test_a_link_in_place_of_the_folder_of_copies_is_refused(tables: Server, tmp_path: Path) -> None:
    write_rows(tables.folder / "some.parquet", 1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "kept").mkdir(exist_ok=True)
    (tmp_path / "kept" / "sources").symlink_to(elsewhere)
    with pytest.raises(StoreError, match=r"sources is a link, or belongs to another user"):
        labels_at(f"{tables.url}/some.parquet")


def test_a_file_that_is_replaced_while_it_is_copied_is_one_error(tables: Server) -> None:
    path = tables.folder / "some.parquet"
    write_rows(path, 1)
    tables.fault = lambda _name, number: write_rows(path, number)
    with pytest.raises(StoreError, match="was replaced while it was copied: run the same command again"):
        open_source(f"{tables.url}/some.parquet")


@pytest.fixture
def nested(tmp_path: Path) -> str:
    for label, name in enumerate(("a/b", "a-b", "a/-b", "c")):
        write_rows(tmp_path / "own" / f"{name}.parquet", label)
    return put(tmp_path / "own", "nested")


def test_files_in_folders_and_those_that_are_gone_are_no_others(nested: str, tmp_path: Path) -> None:
    expected = [("a/-b.parquet#0", 2), ("a/b.parquet#0", 0), ("a-b.parquet#0", 1), ("c.parquet#0", 3)]  # as on a disk
    assert labels_at(f"{nested}/*.parquet")[::2] == expected
    with pytest.raises(SourceError, match=r"such as 'memory://nested/.*\*\.parquet'"):
        open_source(nested).list()
    fsspec.filesystem("memory").rm("/nested/c.parquet")
    assert labels_at(f"{nested}/*.parquet")[::2] == expected[:-1]


def test_a_copy_that_somebody_changed_or_removed_is_made_again(nested: str, tmp_path: Path) -> None:
    expected = labels_at(f"{nested}/*.parquet")
    copies = sorted((tmp_path / "kept").glob("sources/*/*.parquet"))
    assert len(copies) == 4
    for path, data in zip(copies, (b"", bytes(copies[1].stat().st_size), b"PAR1", None), strict=True):
        path.unlink() if data is None else path.write_bytes(data)
    assert labels_at(f"{nested}/*.parquet") == expected


def test_many_that_copy_the_same_files_at_once_get_all_of_them_and_copy_each_once(tables: Server) -> None:
    write_rows(tables.folder / "some.parquet", 5)
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(labels_at, [f"{tables.url}/some.parquet"] * 6))
    assert found == [[("some.parquet#0", 5), ("some.parquet#1", 5)]] * 6
    size = (tables.folder / "some.parquet").stat().st_size
    assert sum(stop - start >= size for _, start, stop in tables.ranges) == 1


def test_copies_are_listed_and_cleared_unless_they_are_in_use(
    nested: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = open_source(f"{nested}/*.parquet")
    (kept,) = list_kept()
    assert kept.url == f"{nested}/*.parquet"
    assert kept.bytes > 0
    with pytest.raises(StoreError, match="is in use: end the process that reads it first"):
        clear_kept(kept)
    assert len(source.list().samples) == 8
    del source
    gc.collect()
    assert main(["cached", "--clear", f"{nested}/*.parquet"]) == 0
    assert "removed, " in capsys.readouterr().out
    assert list_kept() == []
    assert not [*(tmp_path / "kept" / "sources").iterdir()]
    assert len(labels_at(f"{nested}/*.parquet")) == 8


def test_old_content_is_removed_once_nobody_reads_it(nested: str, tmp_path: Path) -> None:
    source = open_source(f"{nested}/*.parquet")
    write_rows(tmp_path / "own" / "c.parquet", 9)
    put(tmp_path / "own", "nested")
    assert labels_at(f"{nested}/*.parquet")[-1] == ("c.parquet#1", 9)
    assert source.list().samples[-1].label == 3  # what another build has opened stays as it was
    assert len([*(tmp_path / "kept").glob("sources/*/*.parquet")]) == 5
    del source
    gc.collect()
    assert labels_at(f"{nested}/*.parquet")[-1] == ("c.parquet#1", 9)
    assert len([*(tmp_path / "kept").glob("sources/*/*.parquet")]) == 4


def test_what_cannot_be_read_at_a_url_says_what_can(zipped: Server) -> None:
    (zipped.folder / "wrong.tfrec").write_bytes(bytes(40))
    with pytest.raises(SourceError, match="does not list its files"):
        open_source(f"{zipped.url}/photos")
    with pytest.raises(SourceError, match="decompress it, or make"):
        open_source(f"{zipped.url}/photos.tar.gz")
    with pytest.raises(SourceError, match=rf"{zipped.url}/wrong\.tfrec, offset 0"):
        open_source(f"{zipped.url}/wrong.tfrec").list()
    with pytest.raises(SourceError, match="does not exist"):
        open_source(f"{zipped.url}/other.zip").list()
    for name in ("../x", "/etc/x", "a//x"):
        with pytest.raises(SourceError, match="no file in a folder can be called"):
            copy_files(zipped.url, zipped.url, [name], print)
    with pytest.raises(UsageError, match="is a URL"):
        open_source("ftp://example.org/photos")


def test_a_zip_that_is_another_one_now_is_noticed(zipped: Server, photos: Path) -> None:
    source = open_source(f"{zipped.url}/photos.zip")
    sample = source.list().samples[3]
    path = zipped.folder / "photos.zip"
    data = bytearray(path.read_bytes())
    data[sample.members[0].offset + 60] ^= 1
    path.write_bytes(data)
    with pytest.raises(SampleError, match="is damaged"):
        source.load(sample)
