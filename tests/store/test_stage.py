"""Staging copies a cache whole, goes on where it stopped, and refuses what is damaged or does not fit."""

from __future__ import annotations

import shutil

import pytest

from tpucache import DamageError, StoreError
from tpucache.store import stage
from tpucache.store.stage import stage_cache
from tpucache.store.verify import verify_cache


def test_a_staged_cache_is_whole_and_is_used_again(cache, tmp_path):
    told = []
    target = stage_cache(cache, tmp_path, lambda *done: told.append(done))
    assert target.parent == tmp_path
    assert verify_cache(target) == []
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] > 0
    times = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert stage_cache(cache, tmp_path) == target
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == times


def test_an_interrupted_copy_goes_on(cache, tmp_path, monkeypatch):
    copied = []
    copy = stage.copy_file

    def copy_three(source, target, entry):
        if len(copied) == 3:
            raise KeyboardInterrupt
        copied.append(entry.name)
        copy(source, target, entry)

    monkeypatch.setattr(stage, "copy_file", copy_three)
    with pytest.raises(KeyboardInterrupt):
        stage_cache(cache, tmp_path)
    monkeypatch.setattr(stage, "copy_file", lambda s, t, entry: copied.append(entry.name) or copy(s, t, entry))
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


def test_a_place_without_room_is_refused_before_anything_is_copied(cache, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StoreError, match="free"):
        stage_cache(cache, tmp_path / "fast")
    assert not list((tmp_path / "fast").glob("*/*"))
