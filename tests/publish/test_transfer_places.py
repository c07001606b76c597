"""Where fetch and push may write: nowhere that is not empty or an earlier copy of the same cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import fsspec
import numpy as np
import pytest
from made import contents
from patience import PATIENCE
from PIL import Image
from signed import signed

from tpucache import (
    CachedDataset,
    DependencyError,
    Manifest,
    NotACacheError,
    Recipe,
    StoreError,
    UsageError,
    build_cache,
)
from tpucache.publish.transfer import fetch_cache, push_cache
from tpucache.store.copying import CLAIM_NAME
from tpucache.store.remote.url import OF_REPOSITORIES
from tpucache.store.verify import verify_cache
from tpucache.warmup.sources import open_source
from tpucache.warmup.sources.columns import TableOptions


def stop(done, total):
    raise KeyboardInterrupt


@pytest.fixture
def source(cache, tmp_path):
    """A copy of the session's cache that a fault may destroy."""
    return shutil.copytree(cache, tmp_path / "source")


def build_twice(tmp_path, variants=(0, 0), labels=("label",)):
    """Build two caches of the same photographs, with other labels, as (ant, bee) and (bee, ant)."""
    caches = []
    for number, (names, many) in enumerate(zip((("ant", "bee"), ("bee", "ant")), variants, strict=True)):
        photos = tmp_path / f"photos {number}"
        photos.mkdir()
        table = ["image,label"]
        for sample in range(6):
            Image.fromarray(np.full((8, 8, 3), 40 * sample, np.uint8)).save(photos / f"{sample}.png")
            table.append(f"{sample}.png,{names[sample % 2]}")
        (photos / "labels.csv").write_text("\n".join(table))
        for added in sorted({0, many}):
            source = open_source(photos / "labels.csv", TableOptions(label_cols=labels))
            build_cache(source, tmp_path / f"cache {number}", Recipe(size=8, variants=added), jobs=1)
        caches.append(tmp_path / f"cache {number}")
    return caches


@pytest.mark.parametrize("way", ["path", "file", "symlink", "relative", "above", "hard links"])
def test_a_cache_pushed_onto_itself_stays_as_it_is(source, tmp_path, monkeypatch, way):
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    before = contents(source)
    url = {"path": str(source), "file": f"file://{source}/", "symlink": f"{tmp_path}/link", "relative": "source"}.get(
        way
    )
    if way == "above":
        url = f"local://{source}/../source"
    if way == "hard links":
        url = str(shutil.copytree(source, tmp_path / "linked", copy_function=os.link))
        damaged = tmp_path / "linked" / "samples.npz"
        damaged.unlink()
        push_cache(source, url)
        assert verify_cache(tmp_path / "linked") == []
    else:
        with pytest.raises(UsageError, match="the cache itself"):
            push_cache(source, url)
    assert contents(source) == before


def test_neither_push_nor_fetch_goes_into_the_cache_it_reads(source, tmp_path):
    before = contents(source)
    with pytest.raises(UsageError, match="inside the cache"):
        push_cache(source, f"file://{source}/copy")
    with pytest.raises(UsageError, match="inside the cache"):
        fetch_cache(str(source), source / "copy")
    with pytest.raises(UsageError, match="the cache itself"):
        fetch_cache(f"file://{source}", source)
    with pytest.raises(UsageError, match="is inside"):
        fetch_cache(f"simplecache::file://{source}", tmp_path)
    assert contents(source) == before


@pytest.mark.parametrize("name", ["index.npy", "manifest.json.bak", "v00-00000.lmdb", ".index.npy.part", "notes.txt"])
def test_fetch_writes_into_no_folder_of_someone_else(cache, tmp_path, name):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_bytes(b"mine")
    with pytest.raises(UsageError, match=f"mine holds {name} and no cache"):
        fetch_cache(str(cache), tmp_path / "mine")
    assert contents(tmp_path / "mine") == {name: b"mine"}


@pytest.mark.parametrize("name", ["index.npy", "v00-00000.lmdb", "notes.txt"])
def test_push_writes_over_nothing_of_someone_else(cache, memory, name):
    fsspec.filesystem("memory").pipe(f"{memory}/{name}", b"mine")
    with pytest.raises(UsageError, match=f"holds {name} and no cache"):
        push_cache(cache, memory)
    assert fsspec.filesystem("memory").find(memory) == [f"/transfer/cache/{name}"]
    assert fsspec.filesystem("memory").cat(f"{memory}/{name}") == b"mine"


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0, 1, 2])
def test_a_partial_copy_is_continued_by_its_own_cache_only(tmp_path, memory, moment):
    """Two caches of equal sizes, the first stopped before, between and after its files."""
    first, second = build_twice(tmp_path)
    assert [entry.bytes for entry in Manifest.load(first).files] == [e.bytes for e in Manifest.load(second).files]

    def stop_later(done, total):
        seen.append(done)
        if len(seen) > moment:
            raise KeyboardInterrupt

    for copy, where in ((push_cache, memory), (fetch_cache, tmp_path / "fetched")):
        seen = []
        with pytest.raises(KeyboardInterrupt):
            copy(str(first), where, stop_later)
        with pytest.raises(UsageError, match="holds another cache"):
            copy(str(second), where)
        copy(str(first), where)
    assert contents(tmp_path / "fetched") == contents(first)
    fetch_cache(memory, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(first)


@pytest.mark.slow
@pytest.mark.parametrize("labels", [("label",), ()])
def test_a_cache_of_other_labels_or_columns_is_no_later_version(tmp_path, memory, labels):
    """Its shards are those of the first and more, and its tables have names of their own."""
    first, second = build_twice(tmp_path, (0, 1), labels)
    push_cache(first, memory)
    with pytest.raises(UsageError, match="holds another cache"):
        push_cache(second, memory)
    fetch_cache(memory, tmp_path / "fetched")
    with pytest.raises(UsageError, match="holds another cache"):
        fetch_cache(str(second), tmp_path / "fetched")
    assert contents(tmp_path / "fetched") == contents(first)
    assert CachedDataset(tmp_path / "fetched")[0][1] == CachedDataset(first)[0][1]


def test_a_cache_whose_labels_mean_other_classes_is_no_later_version(source, cache, tmp_path, memory):
    manifest = (source / "manifest.json").read_text()
    assert '"ant"' in manifest
    (source / "manifest.json").write_text(signed(manifest.replace('"ant"', '"aphid"')))
    push_cache(cache, memory)
    with pytest.raises(UsageError, match="holds another cache"):
        push_cache(source, memory)
    fetch_cache(memory, tmp_path / "fetched")
    with pytest.raises(UsageError, match="holds another cache"):
        fetch_cache(str(source), tmp_path / "fetched")
    assert CachedDataset(tmp_path / "fetched").classes == CachedDataset(cache).classes


def test_of_two_pushes_to_one_place_the_first_gives_up(cache, memory):
    files, claim = fsspec.filesystem("memory"), f"{memory}/{CLAIM_NAME}"

    def overtake(done, total):
        files.pipe(claim, files.cat(claim).replace(Manifest.load(cache).identity.encode(), b"0" * 64))

    with pytest.raises(StoreError, match="claimed by another push"):
        push_cache(cache, memory, overtake)
    with pytest.raises(NotACacheError):
        fetch_cache(memory, cache.parent / "nothing")


@pytest.mark.slow
def test_a_cache_that_gets_another_version_while_it_is_pushed_arrives_as_it_was(source, memory, photos):
    def change(done, total):
        if done == total:
            build_cache(photos, source, Recipe(size=16, variants=4), jobs=1)

    expected = push_cache(source, memory, change)
    assert Manifest.load(source).parents[-1] == expected.identity
    assert fetch_cache(memory, source.parent / "fetched") == expected
    assert verify_cache(source.parent / "fetched") == []


def test_nothing_but_the_cache_stays_at_its_place(cache, memory):
    push_cache(cache, memory)
    assert {path.rpartition("/")[2] for path in fsspec.filesystem("memory").find(memory)} == set(contents(cache))


def test_a_store_that_lets_nothing_be_removed_still_takes_a_cache(cache, memory, tmp_path, monkeypatch, caplog):
    def refuse(self, path):
        raise PermissionError("forbidden")

    with monkeypatch.context() as patch:
        patch.setattr("fsspec.implementations.memory.MemoryFileSystem.rm_file", refuse)
        push_cache(cache, memory)
    assert "The cache is complete" in caplog.text
    fetch_cache(memory, tmp_path / "fetched")
    assert contents(tmp_path / "fetched") == contents(cache)
    push_cache(cache, memory)


def test_what_a_store_puts_into_each_repository_is_no_hindrance(cache, memory, monkeypatch):
    monkeypatch.setitem(OF_REPOSITORIES, "memory", OF_REPOSITORIES["hf"])
    fsspec.filesystem("memory").pipe(f"{memory}/.gitattributes", b"*.lmdb lfs")
    push_cache(cache, memory)
    assert fsspec.filesystem("memory").cat(f"{memory}/.gitattributes") == b"*.lmdb lfs"


@pytest.mark.parametrize(
    "url",
    ["zip://x::file:///nowhere/x.zip", "github://x", "dir://", "ftp://127.0.0.1:1/x", "http://[", "", "reference://x"],
)
def test_a_url_that_leads_nowhere_is_one_clear_line(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UsageError, StoreError, NotACacheError, DependencyError)) as caught:
        fetch_cache(url, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["", "gs://bucket/x", "file/x", "loop", "nothing/at/all\0"])
def test_a_folder_that_cannot_be_is_one_clear_line(cache, tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises((UsageError, StoreError)):
        fetch_cache(str(cache), target)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop"}


def test_a_copy_that_may_not_become_so_large_is_one_error(cache, tmp_path):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))\n"
        "from tpucache.cli import main; sys.exit(main(['push', *sys.argv[1:]]))"
    )
    words = [sys.executable, "-B", "-c", code, cache, tmp_path / "copy"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
