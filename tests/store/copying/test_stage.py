"""Staging copies a cache whole, continues where it stopped, and refuses what is damaged or does not fit."""

from __future__ import annotations

import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from patience import PATIENCE, wait_for
from written import with_labels

from tpucache import DamageError, Manifest, UsageError
from tpucache.store import copying
from tpucache.store.copying import CLAIM_NAME, hold_folder, stage_cache
from tpucache.store.files import write_atomically
from tpucache.store.verify import verify_cache


def test_a_staged_cache_is_whole_and_is_used_again(cache, tmp_path):
    reported = []
    target = stage_cache(cache, tmp_path, lambda *done: reported.append(done))
    assert target.parent == tmp_path
    assert verify_cache(target) == []
    assert reported[0][0] == 0
    assert reported[-1][0] == reported[-1][1] > 0
    times = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert stage_cache(cache, tmp_path) == target
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == times


def test_an_interrupted_copy_continues(cache, tmp_path, monkeypatch):
    copied = []
    copy = copying.copy_file

    def copy_three(source, target, entry, chunks):
        if len(copied) == 3:
            raise KeyboardInterrupt
        copied.append(entry.name)
        copy(source, target, entry, chunks)

    monkeypatch.setattr(copying, "copy_file", copy_three)
    with pytest.raises(KeyboardInterrupt):
        stage_cache(cache, tmp_path)
    monkeypatch.setattr(copying, "copy_file", lambda s, t, entry, _: copied.append(entry.name) or copy(s, t, entry))
    target = stage_cache(cache, tmp_path)
    assert len(copied) == len(set(copied))
    assert verify_cache(target) == []


def test_a_damaged_file_is_refused_and_leaves_no_copy(cache, tmp_path):
    source = shutil.copytree(cache, tmp_path / "source")
    victim = source / "v01-00001.lmdb"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with pytest.raises(DamageError, match=victim.name):
        stage_cache(source, tmp_path / "fast")
    (target,) = (tmp_path / "fast").iterdir()
    assert not (target / victim.name).exists()
    assert not (target / "manifest.json").exists()
    assert not list(target.glob(".*"))


def test_a_staged_copy_belongs_to_its_own_cache(cache, tmp_path):
    """The other one has the same records and sizes, and another table of samples."""
    sources = [with_labels(cache, tmp_path / f"{label}", np.full(8, label)) for label in (0, 1)]
    assert Manifest.load(sources[0]).total_bytes == Manifest.load(sources[1]).total_bytes
    places = [stage_cache(source, tmp_path / "fast") for source in (*sources, sources[0])]
    for source, place in zip(sources, places, strict=False):
        assert (place / "samples.npz").read_bytes() == (source / "samples.npz").read_bytes()
        assert Manifest.load(place) == Manifest.load(source)
    assert places[0] == places[2] != places[1]


@pytest.mark.parametrize("name", ["index.npy", "samples.npz", "v01-00001.lmdb"])
def test_a_staged_file_that_was_altered_is_copied_again(cache, tmp_path, name):
    target = stage_cache(cache, tmp_path)
    data = bytearray((target / name).read_bytes())
    data[len(data) // 2] ^= 1
    (target / name).write_bytes(data)
    assert stage_cache(cache, tmp_path) == target
    assert verify_cache(target) == []
    assert {path.name for path in target.iterdir()} == {path.name for path in cache.iterdir()}


def test_a_folder_of_someone_else_is_not_written_into(cache, tmp_path):
    target = stage_cache(cache, tmp_path)
    names = sorted(path.name for path in target.iterdir())
    (target / "manifest.json").unlink()
    (target / "index.npy").write_bytes(b"mine")
    with pytest.raises(UsageError, match="no cache that could be continued"):
        stage_cache(cache, tmp_path)
    assert (target / "index.npy").read_bytes() == b"mine"
    assert sorted(path.name for path in target.iterdir()) == [name for name in names if name != "manifest.json"]


def test_a_place_inside_the_cache_is_refused(cache, tmp_path):
    source = shutil.copytree(cache, tmp_path / "source")
    with pytest.raises(UsageError, match="inside the cache"):
        stage_cache(str(source), str(source))
    assert sorted(source.iterdir()) == [source / path.name for path in sorted(cache.iterdir())]


def test_a_place_may_be_a_file_url_and_no_other(cache, tmp_path):
    assert stage_cache(str(cache), f"file://{tmp_path}/fast").parent == tmp_path / "fast"
    with pytest.raises(UsageError, match="gs://"):
        stage_cache(cache, "gs://bucket/fast")


def test_who_stages_a_cache_that_another_process_stages_waits_for_it(cache, tmp_path, caplog):
    target = stage_cache(cache, tmp_path)
    whole = (target / "v00-00000.lmdb").read_bytes()
    (target / "v00-00000.lmdb").write_bytes(b"altered")
    with caplog.at_level(logging.WARNING, "tpucache"), ThreadPoolExecutor(1) as threads:
        with hold_folder(target, "staging a cache into"):
            staged = threads.submit(stage_cache, cache, tmp_path)
            wait_for(lambda: staged.done() or any("waiting for it" in message for message in caplog.messages))
            assert (target / "v00-00000.lmdb").read_bytes() == b"altered"
        assert staged.result(PATIENCE) == target
    assert (target / "v00-00000.lmdb").read_bytes() == whole


def test_a_link_that_somebody_left_under_a_temporary_name_reaches_no_file_elsewhere(cache, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    target = tmp_path / stage_cache(cache, tmp_path / "other").name
    target.mkdir()
    for name in ("manifest.json", CLAIM_NAME):
        (target / f".{name}.{os.getpid()}.tmp").symlink_to(victim)
    write_atomically(target / "manifest.json", b"{}")
    assert victim.read_text() == "precious"
