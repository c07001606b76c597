"""Skipped samples are tried again: a cache of which all are sound is the one that a sound source makes."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpucache import (
    BuildError,
    DamageError,
    Recipe,
    SourceError,
    UnfinishedError,
    UsageError,
    build_cache,
    verify_cache,
)
from tpucache.cli import main
from tpucache.store.cache import Cache
from tpucache.store.manifest import Manifest
from tpucache.warmup import TableOptions, TableSource, blocks, library_versions, relabel_cache
from tpucache.warmup.records import presize
from tpucache.warmup.records.encode import SampleEncoder

pytestmark = pytest.mark.slow

Digests = Callable[[Path], dict[str, str]]
COUNT = 11
BAD = (0, 4, 7, 8, 10)
OPTIONS = TableOptions(label_cols=("label",), fold_col="fold")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two or three samples and chunks of one."""
    monkeypatch.setattr(blocks, "MIN_BLOCK_SAMPLES", 3)
    monkeypatch.setattr(blocks, "MIN_CHUNKS", COUNT)


class Data:
    """A table of images, some of which are broken."""

    def __init__(self, root: Path, recipe: Recipe, encode: Callable[..., bytes], image: Callable[..., Any]) -> None:
        self.root, self.recipe, self.table = root, recipe, root / "train.csv"
        root.mkdir()
        self._files = [encode(image(14, 12, seed=number), "PNG") for number in range(COUNT)]
        rows = [f"{number}.png,{'xyz'[number % 3]},{number % 2},{number * 'word'}" for number in range(COUNT)]
        self.table.write_text("\n".join(["path,label,fold,text", *rows]) + "\n")
        self.write(*range(COUNT))

    def write(self, *numbers: int, content: bytes | None = None) -> None:
        for number in numbers:
            (self.root / f"{number}.png").write_bytes(self._files[number] if content is None else content)

    def build(self, cache: Path, **options: Any) -> Manifest:
        source = TableSource(self.table, OPTIONS)
        return build_cache(source, cache, self.recipe, jobs=1, on_error="skip", **options)


@pytest.fixture
def data(tmp_path: Path, jitter: str, encode: Callable[..., bytes], smooth_image: Callable[..., Any]) -> Data:
    data = Data(tmp_path / "data", Recipe(size=8, variants=1, augment=jitter), encode, smooth_image)
    data.build(tmp_path / "sound")
    data.write(*BAD, content=b"no image")
    data.build(tmp_path / "cache")
    return data


def contents(files: dict[str, str]) -> list[str]:
    """Return the digests of all files but the manifest, whatever they are called."""
    return sorted(digest for name, digest in files.items() if name != "manifest.json")


def test_a_cache_whose_samples_became_sound_is_that_of_a_sound_source(
    data: Data, tmp_path: Path, digests: Digests, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, sound = tmp_path / "cache", Manifest.load(tmp_path / "sound")
    before, first = digests(cache), Manifest.load(cache)
    data.write(4, 7, 10)
    data.write(8, content=b"")
    assert data.build(cache) == first
    assert digests(cache) == before
    with pytest.raises(UnfinishedError, match="same command again"):
        data.build(cache, retry=True, time_limit=0)
    assert data.build(cache) == first
    words = ["warmup", str(data.table), str(cache), "--size", "8", "--variants", "1", "--augment", data.recipe.augment]
    assert main([*words, "--label-col", "label", "--fold-col", "fold", "--jobs", "1", "--retry"]) == 0
    assert "2 skipped" in capsys.readouterr().out
    partly = Manifest.load(cache)
    assert verify_cache(cache) == []
    assert [skip.number for skip in partly.skipped] == [0, 8]
    assert partly.skipped[0].reason == first.skipped[0].reason
    assert partly.skipped[1].reason != first.skipped[3].reason
    assert Cache.open(cache).samples.numbers.tolist() == [1, 2, 3, 4, 5, 6, 7, 9, 10]
    assert partly.identity != first.identity
    assert set(digests(cache)) == {"manifest.json", *(entry.name for entry in partly.files)}
    data.write(0, 8)
    whole = data.build(cache, retry=True)
    assert whole.skipped == ()
    assert (whole.fingerprint, whole.statistics, whole.classes) == (sound.fingerprint, sound.statistics, sound.classes)
    assert whole.source == sound.source
    assert contents(digests(cache)) == contents(digests(tmp_path / "sound"))
    assert data.build(cache, retry=True) == whole


def test_samples_that_fail_again_leave_all_files_but_the_manifest_as_they_are(
    data: Data, tmp_path: Path, digests: Digests
) -> None:
    cache = tmp_path / "cache"
    before, first = digests(cache), Manifest.load(cache)
    assert data.build(cache, retry=True) == first
    assert digests(cache) == before
    data.write(4, content=b"")
    manifest = data.build(cache, retry=True)
    assert manifest.skipped[1] != first.skipped[1]
    assert manifest.skipped[2:] == first.skipped[2:]
    assert contents(digests(cache)) == contents(before)


def test_only_samples_that_changed_are_tried_again(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    tried, real = list[str](), SampleEncoder.load
    monkeypatch.setattr(SampleEncoder, "load", lambda self, sample: tried.append(sample.path) or real(self, sample))

    def retried(**options: Any) -> set[str]:
        tried.clear()
        data.build(tmp_path / "cache", **options)
        return {path for path in tried if path in {f"{number}.png" for number in BAD}}

    data.write(7, content=b"no imagE")  # of the same size
    (data.root / "8.png").unlink()
    command = ["warmup", str(data.table), str(tmp_path / "cache"), "--size", "8", "--variants", "1", "--retry"]
    command += ["--augment", data.recipe.augment, "--label-col", "label", "--fold-col", "fold", "--dry-run"]
    assert main([*command, "--sheet", str(tmp_path / "sheet.png")]) == 0
    text = capsys.readouterr().out
    assert "retry     2 of 5 skipped samples" in text
    assert "2 samples, 2 cannot be used" in text
    assert retried(retry=True) == {"7.png", "8.png"}
    assert "3 of 5 skipped samples have not changed and are not tried again: --retry-all" in caplog.text
    assert retried(retry=True) == {"8.png"}  # what cannot be read may be readable now
    assert retried(retry_all=True) == {f"{number}.png" for number in BAD}
    assert retried() == set()
    data.recipe = dataclasses.replace(data.recipe, max_pixels=10_000)
    assert len(retried(retry=True)) == len(BAD)
    data.recipe = dataclasses.replace(data.recipe, max_pixels=None)
    monkeypatch.setattr(presize, "resizer_versions", lambda: {"cykooz_resizer": "99.0"})
    assert len(retried(retry=True)) == len(BAD)
    data.recipe = dataclasses.replace(data.recipe, variants=2)
    retried()  # the manifest names other libraries now than those that skipped samples
    assert len(retried(retry=True)) == len(BAD)
    assert retried(retry=True) == {"8.png"}


@pytest.mark.parametrize("changed", ["library", "limit"])
def test_what_was_skipped_otherwise_before_a_build_was_continued_is_tried_again(
    changed: str,
    data: Data,
    tmp_path: Path,
    failing_rename: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    data.write(0, content=b"\0\0\0\x18ftypheic")
    with failing_rename("manifest.json", KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        data.build(tmp_path / "other")
    found = library_versions._library_versions()
    if changed == "library":
        monkeypatch.setattr(library_versions, "_library_versions", lambda: {**found, "pillow-heif": "99.0"})
    else:
        data.recipe = dataclasses.replace(data.recipe, max_pixels=10_000)
    assert "pip install pillow-heif" in data.build(tmp_path / "other").skipped[0].reason
    data.build(tmp_path / "other", retry=True)
    assert "have not changed" not in caplog.text


def test_labels_that_were_wrong_are_read_again(data: Data, tmp_path: Path, digests: Digests) -> None:
    data.write(*BAD)
    lines = data.table.read_text().splitlines()
    data.table.write_text("\n".join(line.replace("5.png,z", "5.png,") for line in lines) + "\n")
    assert [skip.path for skip in data.build(tmp_path / "other").skipped] == ["5.png"]
    data.table.write_text("\n".join(lines) + "\n")
    data.build(tmp_path / "other", retry=True)
    assert contents(digests(tmp_path / "other")) == contents(digests(tmp_path / "sound"))


def test_a_retry_that_was_killed_tries_what_was_repaired_since(
    data: Data, tmp_path: Path, digests: Digests, failing_rename: Any
) -> None:
    data.write(4, 7)
    with failing_rename("manifest.json", KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        data.build(tmp_path / "cache", retry=True)
    data.write(*BAD)
    data.build(tmp_path / "cache", retry=True)
    assert contents(digests(tmp_path / "cache")) == contents(digests(tmp_path / "sound"))


def test_a_disk_without_links_gets_copies(
    data: Data, tmp_path: Path, digests: Digests, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    data.write(*BAD[:2])
    data.build(tmp_path / "cache", retry=True)
    assert "without hard links" in caplog.text
    data.write(*BAD)
    data.build(tmp_path / "cache", retry=True)
    assert contents(digests(tmp_path / "cache")) == contents(digests(tmp_path / "sound"))


def test_retried_samples_come_before_those_that_are_added(data: Data, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    data.write(*BAD)
    data.table.write_text(data.table.read_text() + "new.png,x,0,more\n")
    shutil.copy(data.root / "1.png", data.root / "new.png")
    with pytest.raises(UsageError, match="add them first, by the same command without --retry"):
        data.build(cache, retry=True)
    data.build(cache)
    data.build(cache, retry=True)
    assert verify_cache(cache) == []
    table = Cache.open(cache).samples
    assert table.numbers.tolist() == list(range(COUNT + 1))
    assert list(table.paths) == [*(f"{number}.png" for number in range(COUNT)), "new.png"]


def test_what_cannot_be_right_is_refused_and_changes_nothing(data: Data, tmp_path: Path, digests: Digests) -> None:
    cache, relabelled = tmp_path / "cache", Path(shutil.copytree(tmp_path / "cache", tmp_path / "relabelled"))
    relabel_cache(relabelled, data.table, TableOptions(label_cols=("text",)))
    data.write(*BAD)
    before = digests(relabelled)
    with pytest.raises(SourceError, match="was relabelled, and the new labels of its skipped samples are not known"):
        data.build(relabelled, retry=True)
    assert digests(relabelled) == before
    opened = Cache.open(cache)
    row = opened.index_of(opened.manifest.shards[1])[1]
    shard = cache / opened.manifest.shards[1].name
    with shard.open("r+b") as file:
        file.seek(int(row["offset"]) + 5)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    before = digests(cache)
    with pytest.raises(
        DamageError, match=r"record of sample \d+ does not have the checksum that the index lists.*--repair"
    ):
        data.build(cache, retry=True)
    assert before.items() <= digests(cache).items()
    with pytest.raises(BuildError, match="not finished"):
        relabel_cache(cache, data.table, OPTIONS)
