"""Caches in S3: the pixels of a local read, one version of each file, and keys that are looked up anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from servers import Server
from stores import KEYS, serve_s3

from tpucache import CachedDataset, CachedLoader, StoreError, UsageError
from tpucache.publish.transfer import fetch_cache, push_cache
from tpucache.store.remote import objects, retry
from tpucache.store.remote.url import Remote
from tpucache.store.verify import verify_cache


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keys for a store, from the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 0.005)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """The address of a server that behaves as S3 does, with the bucket `bucket`."""
    with serve_s3() as url:
        yield url


@pytest.fixture
def s3(moto: str, keys: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a bucket that the environment's keys open."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    return "s3://bucket"


def epoch(dataset: CachedDataset) -> list[list[int]]:
    """Return the pixels of an epoch in another order than the files have."""
    loader = CachedLoader(dataset, 16, shuffle="block", window=32, seed=3)
    return [images.flatten().tolist() for images, _ in loader]


@pytest.mark.thorough
def test_a_cache_pushed_to_s3_trains_and_fetches_as_its_original(
    s3: str, cache: Path, small_pieces: None, tmp_path: Path
) -> None:
    push_cache(cache, f"{s3}/cache")
    push_cache(cache, f"{s3}/cache")
    dataset = CachedDataset(f"{s3}/cache/", cache_dir=tmp_path / "kept", in_memory=False)
    assert epoch(dataset) == epoch(CachedDataset(cache))
    fetch_cache(f"{s3}/cache", tmp_path / "copy")
    verify_cache(tmp_path / "copy")
    names = Remote(f"{s3}/cache").names()
    assert names >= {path.name for path in cache.iterdir() if path.suffix != ".lock"} - {"work"}


def test_a_bucket_that_is_not_there_is_said_to_be_missing(s3: str, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"s3://other/cache: there is no such bucket\. Check its name"):
        CachedDataset("s3://other/cache", cache_dir=tmp_path)
    with pytest.raises(StoreError, match="there is no such bucket"):
        push_cache(cache, "s3://other/cache")


@pytest.mark.parametrize(
    "url", ["s3://bucket/run#1/cache", "gs://bucket/run?1/cache", "http://127.0.0.1:9/run#1/cache"]
)
def test_a_mark_that_ends_a_path_is_refused_before_anything_is_read_or_written(
    keys: None, cache: Path, tmp_path: Path, url: str
) -> None:
    for use in (lambda: CachedDataset(url, cache_dir=tmp_path), lambda: push_cache(cache, url)):
        with pytest.raises(UsageError, match="which ends the path of such a URL"):
            use()


@pytest.mark.parametrize("endpoint", ["no url", "ftp://example.org"])
def test_an_endpoint_that_is_no_address_is_one_error(
    keys: None, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(StoreError, match=r"InvalidUri|HTTP error"):
        Remote("s3://bucket/cache", silence=1).read("manifest.json", 100)


def test_keys_that_no_request_can_hold_are_one_error(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore panics: that is no Exception."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a\n")
    monkeypatch.setattr(retry, "_RETRIES", 0)
    with pytest.raises(StoreError, match="obstore cannot send the request"):
        Remote(f"{s3}/cache").manifest()


@pytest.mark.parametrize("config", [None, b"[default\nx=", b"\xff\xfe\x00[prof"])
def test_keys_of_a_profile_that_cannot_be_read_are_one_error(
    keys: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: bytes | None
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    (tmp_path / ".aws").mkdir()
    if config is None:
        monkeypatch.setenv("AWS_PROFILE", "missing")
    else:
        (tmp_path / ".aws" / "config").write_bytes(config)
    with pytest.raises(UsageError, match=r"the keys of AWS cannot be read: .*Repair ~/\.aws or AWS_PROFILE"):
        Remote("s3://bucket/cache")


def test_of_several_that_create_a_file_at_once_one_does(s3: str) -> None:
    remotes = [Remote(f"{s3}/claimed") for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda at: remotes[at].create("claim", b"%d" % at), range(6)))
    assert sum(found) == 1
    assert remotes[0].read("claim", 9) == b"%d" % found.index(True)
    assert remotes[found.index(True)].create("claim", b"%d" % found.index(True))  # the answer was lost, it asks again


def test_a_store_that_cannot_create_atomically_still_replaces_no_file(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.exceptions import NotSupportedError

    put = obstore.put

    def plain_put(store: Any, name: str, data: bytes, *, mode: str | None = None) -> Any:
        if mode == "create":
            raise NotSupportedError("If-None-Match")
        return put(store, name, data)

    monkeypatch.setattr(obstore, "put", plain_put)
    remote = Remote(f"{s3}/claimed-by-put")
    assert remote.create("claim", b"mine")
    assert remote.create("claim", b"mine")  # the answer was lost, it asks again
    assert not remote.create("claim", b"another")
    assert remote.read("claim", 9) == b"mine"


def test_parts_of_an_object_that_was_replaced_are_refused(s3: str, tmp_path: Path) -> None:
    remote = Remote(f"{s3}/folder")
    remote.write("file", bytes(100))
    target = memoryview(bytearray(10))
    remote.read_into("file", 0, target, 100)
    with pytest.raises(OSError, match="100 bytes in the store, the manifest says 101"):
        remote.read_into("file", 0, target, 101)
    remote.write("file", b"\1" * 100)
    with pytest.raises(OSError, match="was replaced in the store"):
        remote.read_into("file", 10, target, 100)
    assert bytes(target) == bytes(10)


@pytest.fixture
def served(server: Server, keys: None, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The cache behind a server that answers as S3 does, at `s3://bucket/cache`, whose answers a test can spoil."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    (tmp_path / "root" / "bucket").mkdir(parents=True)
    (tmp_path / "root" / "bucket" / "cache").symlink_to(cache)
    server.folder = tmp_path / "root"
    return server


def test_keys_that_expire_are_looked_up_anew_or_are_one_error(
    served: Server, cache: Path, small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    served.fault = lambda name, number: "403" if name.endswith("lmdb") and number == 1 else None
    real = objects.ObjectFolder._open
    monkeypatch.setattr(objects.ObjectFolder, "_open", lambda self: found.append("keys") or real(self))
    dataset = CachedDataset("s3://bucket/cache", cache_dir=tmp_path / "kept", in_memory=False)
    assert epoch(dataset) == epoch(CachedDataset(cache))
    assert len(found) >= 2  # threads that are refused at once share new keys
    served.fault = lambda name, number: "403" if name.endswith("lmdb") else None
    dataset = CachedDataset("s3://bucket/cache", cache_dir=tmp_path / "other", in_memory=False)
    with pytest.raises(StoreError, match="The server refuses to send this file: check that the URL"):
        epoch(dataset)


def test_a_store_that_sends_whole_files_for_parts_is_refused(
    served: Server, small_pieces: None, tmp_path: Path
) -> None:
    """As `rclone serve s3` does."""
    served.fault = lambda name, number: "whole" if name.endswith("lmdb") else None
    dataset = CachedDataset("s3://bucket/cache", cache_dir=tmp_path / "kept", in_memory=False)
    with pytest.raises(StoreError, match="Check the network and the URL"):
        epoch(dataset)


def test_a_store_without_keys_says_which_to_set() -> None:
    folder = objects.ObjectFolder("s3://bucket/cache", 1.0, "s3://bucket/cache")
    from obstore.exceptions import GenericError

    def ask(store: object) -> None:
        raise GenericError("Error performing PUT http://169.254.169.254/latest/api/token")

    with pytest.raises(PermissionError, match="set AWS_ACCESS_KEY_ID"):
        folder._call(ask, "file")


def test_a_forked_process_is_refused_and_does_not_hang(served: Server) -> None:
    """The client has threads, which a forked process has not."""
    program = (
        "import os, sys\n"
        "import tpucache.store.remote.url\n"
        "from tpucache.errors import UsageError\n"
        "remote = tpucache.store.remote.url.Remote('s3://bucket/cache')\n"
        "remote.read('manifest.json', 1 << 20)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try:\n"
        "        remote.read_into('manifest.json', 0, memoryview(bytearray(1)), 1)\n"
        "    except UsageError as error:\n"
        "        os._exit(7 if 'forkserver' in str(error) else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    # Python 3.12 and newer warn of a fork beside threads, which is what this test is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


@pytest.mark.parametrize("change", [lambda remote: remote.write("file", b""), lambda remote: remote.remove("file")])
def test_a_web_server_that_should_be_written_to_is_one_error(change: Callable[[Remote], object]) -> None:
    with pytest.raises(UsageError, match=r"^http://127\.0\.0\.1:9/cache is a web server, which can be read only"):
        change(Remote("http://127.0.0.1:9/cache"))
