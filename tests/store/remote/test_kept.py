"""Anybody may change what is kept of a cache at a URL, at any time: pixels are right, or one error says why not."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import wait_for
from servers import Server
from thorough import thorough

from tpucache import CachedDataset, CachedLoader
from tpucache.errors import StoreError, TpucacheError
from tpucache.store.remote import local
from tpucache.store.remote.cache import MANIFEST_COPY, clear_kept, list_kept
from tpucache.store.remote.reader import RemoteReader

SAMPLES, LATER = 48, 37  # how many there are, and one in the last shard
Opened = Callable[..., CachedDataset]
Damage = Callable[[Path], None]


@pytest.fixture
def cache(noise: Path) -> Path:
    return noise


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zero(path: Path) -> None:
    """As a hole reads that a backup has made of data: same size, same time, same file."""
    found = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(found.st_size))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def replace(path: Path) -> None:
    """As `zero`, under the name of the file that was there."""
    found, other = path.stat(), path.with_name("other")
    with other.open("wb") as file:
        file.truncate(found.st_size)
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(path)


def swap(path: Path) -> None:
    """Swap a file with the next one."""
    files = sorted(each for each in path.parent.iterdir() if each.suffix != ".lock")
    if len(files) == 1:
        return
    other, aside = files[(files.index(path) + 1) % len(files)], path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


DAMAGES = [*thorough(remove), cut, *thorough(zero, replace), swap]


def kept_files(dataset: CachedDataset) -> list[Path]:
    """Return a file of each kind: the state, the manifest, shards, tables, what is known of the URL."""
    folder = dataset.directory
    shards = sorted(folder.glob("v00-*.lmdb"))
    others = [folder / local.STATE_NAME, folder / MANIFEST_COPY, *folder.glob("*.np[yz]")]
    return [*others, shards[0], shards[-1], *folder.parent.glob("urls/*.json")]


def pixels(image: torch.Tensor) -> bytes:
    return image.numpy().tobytes()


def images(dataset: CachedDataset) -> list[bytes]:
    return [pixels(image) for batch, _ in CachedLoader(dataset, 32, threads=1) for image in batch]


def settle(dataset: CachedDataset) -> None:
    """Wait until a change of any shard would have another time than its last one."""
    times = [path.stat().st_ctime_ns for path in dataset.directory.glob("*.lmdb")]
    wait_for(lambda: time.time_ns() > max(times) + 50_000_000)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe what was proven from the next tick on, and not only after 2 seconds."""
    monkeypatch.setattr(local, "_TICK_NS", 10_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("is_settled", [*thorough(pytest.param(False, id="fresh")), pytest.param(True, id="settled")])
@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_happens_to_kept_files_pixels_are_right_or_one_error_says_why(
    opened: Opened, cache: Path, settled: None, damage: Damage, is_settled: bool
) -> None:
    expected = images(CachedDataset(cache))
    dataset = opened()
    assert images(dataset) == expected
    for path in kept_files(dataset):
        if is_settled:
            settle(dataset)
            assert images(dataset) == expected  # it is proven now
            assert images(dataset) == expected
        batches = iter(CachedLoader(dataset, 32, threads=1, prefetch=0))
        first, _ = next(batches)
        damage(path)
        found = [*first, *(image for batch, _ in batches for image in batch)]
        assert [pixels(image) for image in found] == expected  # in the middle of an epoch
        assert pixels(dataset[LATER][0]) == expected[LATER]
        assert images(dataset) == expected  # the next epoch
        if path.exists():
            damage(path)
        with contextlib.suppress(TpucacheError):
            assert images(opened()) == expected  # opened beside it
        dataset.close()
        del batches, dataset
        if path.exists():
            damage(path)
        dataset = opened()
        assert images(dataset) == expected  # opened again
        assert images(dataset) == expected


def test_what_was_removed_is_brought_ahead_of_reading_and_kept_again(
    opened: Opened, cache: Path, server: Server
) -> None:
    dataset, expected = opened(), images(CachedDataset(cache))
    assert images(dataset) == expected
    for path in dataset.directory.glob("v00-*.lmdb"):
        path.unlink()
    dataset.close()
    with opened() as dataset:  # whose end waits for the pieces that are being fetched
        assert images(dataset) == expected
    asked = len(server.ranges)
    assert images(opened()) == expected
    assert server.ranges[asked:] == []


def test_records_are_compared_once_as_long_as_nobody_changes_the_files(
    opened: Opened, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened()
    expected = images(dataset)
    settle(dataset)
    assert images(dataset) == expected
    monkeypatch.setattr(RemoteReader, "_read_kept", lambda *_: pytest.fail("a proven record is compared again"))
    assert images(dataset) == expected


def test_a_file_that_changes_while_a_compiled_loop_reads_proven_records_is_noticed(
    opened: Opened, settled: None
) -> None:
    dataset = opened()
    images(dataset)
    settle(dataset)
    images(dataset)
    reader, rows = dataset.cache.reader, dataset.cache.index[np.arange(3)]
    assert reader.read_by(rows, lambda _, places: len(places)) == 3

    def read(_: object, places: np.ndarray) -> int:
        zero(dataset.directory / "v00-00000.lmdb")
        return len(places)

    assert reader.read_by(rows, read) == 0


def test_a_file_that_others_may_write_is_compared_each_time(
    opened: Opened, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has mapped a file for writing may change it, and its times stay."""
    dataset = opened()
    expected = images(dataset)
    for path in dataset.directory.glob("*.lmdb"):
        path.chmod(0o666)
    settle(dataset)
    assert images(dataset) == expected
    compared = []
    note = local.LocalCopy.note_compared
    monkeypatch.setattr(
        local.LocalCopy, "note_compared", lambda self, *values: (compared.extend(values[1]), note(self, *values))[1]
    )
    assert images(dataset) == expected
    assert sorted(compared) == list(range(SAMPLES))


def test_who_changes_files_without_end_ends_reading_with_one_error(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = opened()

    def read_zeros(_reader: object, _rows: object, views: list[list[memoryview]], _descriptors: object) -> None:
        for view in itertools.chain.from_iterable(views):
            view[:] = bytes(len(view))

    monkeypatch.setattr(RemoteReader, "_read_each", read_zeros)
    with pytest.raises(StoreError, match="are changed by another program while they are read"):
        images(dataset)


@pytest.mark.parametrize("name", ["state", "v00-00000.lmdb", "index.npy.lock", "index.npy"])
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_link_that_somebody_left_in_the_folder_reaches_no_file_elsewhere(
    opened: Opened, cache: Path, tmp_path: Path, name: str, kind: str
) -> None:
    directory = opened().directory
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 1000)
    path = directory / name
    path.unlink(missing_ok=True)
    (path.symlink_to if kind == "symbolic" else path.hardlink_to)(victim)
    with contextlib.suppress(StoreError):
        assert images(opened()) == images(CachedDataset(cache))
    assert victim.read_bytes() == b"precious" * 1000


def test_a_link_in_place_of_the_notes_of_urls_is_refused(opened: Opened, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "urls").symlink_to(elsewhere)
    with pytest.raises(StoreError, match=r"urls is a link, or belongs to another user"):
        opened()
    assert not [*elsewhere.iterdir()]


def test_clearing_leaves_no_state_beside_missing_shards(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    """Also where it is stopped between two files."""
    dataset = opened()
    images(dataset)
    dataset.close()
    (kept,) = list_kept(tmp_path / "kept")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            clear_kept(kept)
    assert not kept.directory.exists()
    assert images(opened()) == images(CachedDataset(cache))
    assert [each.url for each in list_kept(tmp_path / "kept")] == [kept.url]
