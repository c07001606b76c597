"""fetch and push: whole and checked through every kind of store, cut off anywhere, never with a wrong byte."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import random
import shutil
import subprocess
import sys

import fsspec
import pytest
from made import contents, flip
from patience import wait_for

from tpucache import (
    DamageError,
    DependencyError,
    FormatError,
    Manifest,
    NotACacheError,
    Recipe,
    StoreError,
    UsageError,
    build_cache,
)
from tpucache.insight import hashes
from tpucache.publish.transfer import fetch_cache, push_cache
from tpucache.store.copying import CLAIM_NAME
from tpucache.store.hashes import hashes_name, most_hashes_bytes
from tpucache.store.remote import url as remote
from tpucache.store.verify import verify_cache


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(remote, "_CHUNK", 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["memory", "file", "path", "http", "http without ranges"])
def test_a_round_trip_brings_every_byte_back(scheme, cache, tmp_path, served, memory):
    target = tmp_path / "new" / "fetched"
    url = {"memory": memory, "file": f"file://{tmp_path}/a/b", "path": str(tmp_path / "a b#c?d%20")}.get(
        scheme, served.url
    )
    served.ranges = scheme == "http"
    push_cache(cache, memory)
    if not scheme.startswith("http"):
        assert push_cache(cache, f"{url}/") == Manifest.load(cache)
    reported = []
    assert fetch_cache(url, target, lambda *done: reported.append(done)) == Manifest.load(cache)
    assert contents(target) == contents(cache)
    total = Manifest.load(cache).total_bytes
    assert reported[-1] == (total, total)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert len(reported) > 2 * len(Manifest.load(cache).files)


def test_hashes_are_pushed_when_they_are_asked_for_and_then_fetched(stored, tmp_path, memory):
    name = hashes_name(Manifest.load(stored))
    hashes(stored)
    push_cache(stored, memory)
    fetch_cache(memory, tmp_path / "first")
    assert not (tmp_path / "first" / name).exists()
    push_cache(stored, memory, hashes=True)
    fetch_cache(memory, tmp_path / "second")
    assert contents(tmp_path / "second") == contents(stored)


@pytest.mark.parametrize("way", ["", "endless", "too large", "missing", "refused"])
def test_hashes_of_a_web_server_are_read_as_far_as_they_may_be(way, stored, tmp_path, served):
    name = hashes_name(Manifest.load(stored))
    hashes(stored)
    if way != "missing":
        shutil.copy(stored / name, served.folder / name)
    served.hostile[name] = way
    if way == "too large":
        os.truncate(served.folder / name, most_hashes_bytes(150) + 1)
    fetch_cache(served.url, tmp_path / "fetched")
    assert verify_cache(tmp_path / "fetched") == []
    assert (tmp_path / "fetched" / name).exists() == (way == "")


@pytest.mark.slow
@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("way", ["break_after", "short"])
def test_connections_that_break_at_random_are_gone_on_with(ranges, way, cache, tmp_path, served, caplog):
    served.ranges = ranges
    draws = random.Random(5)
    broken = [draws.choice([None, 0, draws.randrange(9_000)]) for _ in range(16)]

    def start(done, total):
        if not started:
            setattr(served, way, broken)
            started.append(True)

    started = []
    fetch_cache(served.url, tmp_path / "fetched", start)
    assert started
    assert not broken
    assert "once more" not in caplog.text
    assert contents(tmp_path / "fetched") == contents(cache)


def cut_off(limit):
    """Return an `on_progress` that ends the call, as Ctrl-C would, after this many bytes."""

    def report(done, total):
        if done > limit:
            raise KeyboardInterrupt

    return report


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["memory", "http", "http without ranges"])
def test_a_fetch_that_was_cut_off_continues_in_the_middle_of_a_file(scheme, cache, tmp_path, served, memory, caplog):
    url = memory if scheme == "memory" else served.url
    push_cache(cache, memory)
    served.ranges = scheme == "http"
    total = Manifest.load(cache).total_bytes
    target, moments = tmp_path / "fetched", random.Random(3)
    for limit in sorted(moments.randrange(total) for _ in range(6)):
        with pytest.raises(KeyboardInterrupt):
            fetch_cache(url, target, cut_off(limit))
        with pytest.raises(NotACacheError):
            Manifest.load(target)
        assert sum(path.stat().st_size for path in target.iterdir()) > limit - 10_000
    served.requests.clear()
    fetch_cache(url, target)
    assert contents(target) == contents(cache)
    assert "once more" not in caplog.text
    if scheme == "http":
        fetched = [pair for pair in served.requests if pair[1]]
        assert len(fetched) * 10_000 < total


@pytest.mark.slow
def test_a_fetch_continues_after_its_process_was_killed(cache, tmp_path, served):
    code = (
        "import pathlib, sys, time\n"
        "from tpucache.publish import transfer\nfrom tpucache.store.remote import url as remote\n"
        "remote._CHUNK = 10_000\n"
        "second = pathlib.Path(sys.argv[2], 'v00-00001.lmdb')\n"
        "transfer.fetch_cache(sys.argv[1], sys.argv[2], lambda *done: second.exists() and time.sleep(600))"
    )
    target = tmp_path / "fetched"
    with subprocess.Popen([sys.executable, "-c", code, served.url, str(target)]) as process:
        try:
            wait_for(lambda: (target / "v00-00001.lmdb").exists() or process.poll() is not None)
            assert process.poll() is None
        finally:
            process.kill()
    fetch_cache(served.url, target)
    assert contents(target) == contents(cache)


def test_a_push_that_was_cut_off_continues_and_sends_nothing_twice(cache, memory):
    total = Manifest.load(cache).total_bytes
    with pytest.raises(KeyboardInterrupt):
        push_cache(cache, memory, cut_off(total // 2))
    with pytest.raises(NotACacheError):
        fetch_cache(memory, cache.parent / "nothing")
    files = fsspec.filesystem("memory")
    before = {path: files.modified(path) for path in files.find(memory) if CLAIM_NAME not in path}
    push_cache(cache, memory)
    assert 0 < len(before) < len(Manifest.load(cache).files)
    assert before == {path: files.modified(path) for path in before}
    assert files.cat(f"{memory}/index.npy") == (cache / "index.npy").read_bytes()


def test_a_damaged_file_of_the_right_size_is_sent_again(cache, memory, tmp_path):
    push_cache(cache, memory)
    files = fsspec.filesystem("memory")
    files.pipe(f"{memory}/v01-00001.lmdb", bytes((cache / "v01-00001.lmdb").stat().st_size))
    push_cache(cache, memory)
    fetch_cache(memory, tmp_path / "fetched")
    assert contents(tmp_path / "fetched") == contents(cache)


def test_a_corrupted_byte_is_refused_after_a_second_try(served, tmp_path, caplog):
    flip(served.folder / "v02-00001.lmdb")
    with pytest.raises(DamageError, match=r"v02-00001\.lmdb arrived twice"):
        fetch_cache(served.url, tmp_path / "fetched")
    assert "fetching it once more" in caplog.text
    assert not (tmp_path / "fetched" / "v02-00001.lmdb").exists()
    assert not list((tmp_path / "fetched").glob("*.part"))
    with pytest.raises(NotACacheError):
        Manifest.load(tmp_path / "fetched")


def spoil_bytes(target):
    (part,) = target.glob(".*.part")
    flip(part)
    flip(target / "index.npy")


def lengthen_part(target):
    (target / ".index.npy.part").write_bytes(bytes(1_000_000))


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "spoil"), [(120_000, spoil_bytes), (0, lengthen_part)])
def test_what_was_spoiled_here_is_fetched_again(served, cache, tmp_path, caplog, limit, spoil):
    target = tmp_path / "fetched"
    with pytest.raises(KeyboardInterrupt):
        fetch_cache(served.url, target, cut_off(limit))
    spoil(target)
    fetch_cache(served.url, target)
    assert contents(target) == contents(cache)
    assert ("once more" in caplog.text) == (spoil is spoil_bytes)


def test_a_damaged_cache_is_not_pushed(cache, tmp_path, memory):
    source = shutil.copytree(cache, tmp_path / "source")
    flip(source / "v01-00000.lmdb")
    with pytest.raises(DamageError, match=r"v01-00000\.lmdb"):
        push_cache(source, memory)


@pytest.fixture
def other(photos, tmp_path):
    """Another cache, with files of the same names and sizes."""
    build_cache(photos, tmp_path / "other", Recipe(size=16, variants=3, seed=9), jobs=1)
    return tmp_path / "other"


def test_another_cache_is_never_overwritten(cache, other, memory, tmp_path):
    push_cache(other, memory)
    with pytest.raises(UsageError, match=f"{memory} holds another cache"):
        push_cache(cache, memory)
    with pytest.raises(UsageError, match="holds another cache"):
        fetch_cache(memory, shutil.copytree(cache, tmp_path / "mine"))
    assert contents(tmp_path / "mine") == contents(cache)


@pytest.mark.slow
def test_what_was_added_to_a_cache_is_added_to_its_copies(photos, memory, tmp_path):
    for variants in (0, 1):
        build_cache(photos, tmp_path / "cache", Recipe(size=8, variants=variants), jobs=1)
        push_cache(tmp_path / "cache", memory)
        fetch_cache(memory, tmp_path / "fetched")
        assert verify_cache(tmp_path / "fetched") == []
        assert Manifest.load(tmp_path / "fetched") == Manifest.load(tmp_path / "cache")


def test_a_disk_without_room_is_reported_before_anything_is_fetched(served, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StoreError, match="free"):
        fetch_cache(served.url, tmp_path / "fetched")
    assert contents(tmp_path / "fetched") == {}


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "v00-00000.lmdb/../../x"])
def test_a_hostile_manifest_writes_nowhere(served, tmp_path, name):
    manifest = served.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"name": "v00-00000.lmdb"', f'"name": "{name}"'))
    with pytest.raises(FormatError, match=r"served/manifest\.json: .*a shard cannot have the name"):
        fetch_cache(served.url, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize("table", [0, 1])
def test_a_table_that_is_too_large_for_its_samples_is_not_fetched(served, tmp_path, table):
    manifest = Manifest.load(served.folder)
    tables = list(manifest.tables)
    tables[table] = dataclasses.replace(tables[table], bytes=1 << 30)
    dataclasses.replace(manifest, tables=tuple(tables)).save(served.folder)
    with pytest.raises(FormatError, match="larger than 150 samples can need"):
        fetch_cache(served.url, tmp_path / "fetched")
    assert not (tmp_path / "fetched").exists()


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("name", ["manifest.json", "samples.npz", "v01-00000.lmdb"])
def test_of_an_endless_answer_no_more_is_read_than_was_asked_for(served, tmp_path, name, ranges):
    served.hostile, served.ranges = {name: "endless"}, ranges
    if name == "manifest.json":
        with contextlib.closing(remote.Remote(served.url)) as place, pytest.raises(FormatError, match="any manifest"):
            place.read(name, 100_000)
    else:
        fetch_cache(served.url, tmp_path / "fetched")  # what was asked for is right
    requests = sum(path.endswith(name) for path, _ in served.requests)
    assert served.sent < requests * 12 << 20  # what fits into the buffers of two sockets


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("name", ["manifest.json", "index.npy"])
def test_an_answer_in_a_coding_that_was_not_asked_for_is_refused(served, tmp_path, name, ranges):
    served.hostile, served.ranges = {name: "gzip"}, ranges
    with pytest.raises(StoreError, match=rf"{name}: HttpError: .* coding 'gzip', which was not asked for"):
        fetch_cache(served.url, tmp_path / "fetched")
    assert sum(path.endswith(name) for path, _ in served.requests) == 1


def test_an_answer_that_is_quoted_stays_one_short_line(served, tmp_path, monkeypatch):
    def refuse(self):
        raise http.client.BadStatusLine("x\r\ny: forged\n" + "z" * 10_000)

    monkeypatch.setattr("http.client.HTTPResponse.begin", refuse)
    with pytest.raises(StoreError, match="x y: forged z") as caught:
        fetch_cache(served.url, tmp_path / "fetched")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("words", "url"),
    [
        *(
            ("give the web server's own URL", url)
            for url in ("simplecache::http://127.0.0.1:1/x", "zip://a::HTTPS://ann:secret@127.0.0.1:1/x.zip")
        ),
        *(
            (r":// cannot be read\. Give a URL that begins with http, https, .*gs", url)
            for url in (
                *("reference://a", "github://ann:secret@a/b", "data://a", "jupyter://a", "zip://a::file:///a.zip"),
                *("simplecache::reference::file:///a", "simplecache::jlab://ann:secret@a", "FILEX://a"),
                *("simplecache://a", "gopher://x/y"),
            )
        ),
    ],
)
def test_places_that_are_no_store_of_files_are_refused_before_anything_is_opened(tmp_path, monkeypatch, words, url):
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: pytest.fail("opened"))
    with pytest.raises(UsageError, match=words) as caught:
        fetch_cache(url, tmp_path / "fetched")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("ranges", [True, False])
def test_what_stops_a_fetch_is_said_and_leaves_no_cache(served, cache, tmp_path, ranges):
    served.ranges = ranges
    shard, target = served.folder / "v01-00000.lmdb", tmp_path / "fetched"

    def again(done, total):
        with pytest.raises(StoreError, match="another process is fetching"):
            fetch_cache(served.url, target)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_cache(served.url, target, again)
    os.truncate(shard, 25_000)
    with pytest.raises(StoreError, match=r"v01-00000\.lmdb: EOFError"):
        fetch_cache(served.url, target)
    shard.unlink()
    with pytest.raises(StoreError, match=r"v01-00000\.lmdb: FileNotFoundError"):
        fetch_cache(served.url, target)
    with pytest.raises(NotACacheError):
        Manifest.load(target)
    (tmp_path / "building" / ".warmup").mkdir(parents=True)
    with pytest.raises(UsageError, match="unfinished warmup"):
        fetch_cache(served.url, tmp_path / "building")


@pytest.mark.parametrize(("status", "asked"), [(403, 1), (404, 1), (503, 7), (429, 7)])
def test_what_the_server_refuses_is_reported_and_what_may_pass_is_tried_again(served, tmp_path, status, asked):
    served.status = status
    with pytest.raises(NotACacheError if status == 404 else StoreError, match="served"):
        fetch_cache(served.url, tmp_path / "fetched")
    assert len(served.requests) == asked


@pytest.mark.parametrize(
    ("url", "lacking", "words"),
    [("memory://x", ["fsspec"], r"pip install .fsspec"), ("s3://bucket/cache", ["obstore", "s3fs"], "s3fs")],
)
def test_a_library_that_a_url_needs_is_named(tmp_path, monkeypatch, url, lacking, words):
    for name in lacking:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DependencyError, match=words):
        fetch_cache(url, tmp_path)
