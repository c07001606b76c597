"""Skipped samples that are tried again: added under their numbers, with the records of a sound source."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from made import build_here, digests, encode, failing_rename, smooth_image, write_rows

from tpucache import Recipe, SourceError, UnfinishedError, repair_cache, verify_cache
from tpucache.store.cache import Cache
from tpucache.store.manifest import Manifest
from tpucache.warmup import TableOptions, TableSource, compact_cache, relabel_cache

pytestmark = pytest.mark.slow

COUNT = 11
BAD = (0, 4, 7, 8, 10)
OPTIONS = TableOptions(label_cols=("label",), fold_col="fold")


class Data:
    def __init__(self, root: Path, recipe: Recipe) -> None:
        self.root, self.recipe, self.table = root, recipe, root / "train.csv"
        root.mkdir()
        self._files = [encode(smooth_image(14, 12, seed=number)) for number in range(COUNT)]
        rows = [f"{number}.png,{'xyz'[number % 3]},{number % 2},{number * 'word'}" for number in range(COUNT)]
        write_rows(self.table, "path,label,fold,text", *rows)
        self.write(*range(COUNT))

    def write(self, *numbers: int, content: bytes | None = None) -> None:
        for number in numbers:
            (self.root / f"{number}.png").write_bytes(self._files[number] if content is None else content)

    def build(self, cache: Path, **options: Any) -> Manifest:
        source = TableSource(self.table, OPTIONS)
        return build_here(source, cache, self.recipe, on_error="skip", **options)


@pytest.fixture
def data(
    tmp_path: Path,
    jitter: str,
) -> Data:
    data = Data(tmp_path / "data", Recipe(size=8, variants=1, augment=jitter))
    data.build(tmp_path / "sound")
    data.write(*BAD, content=b"no image")
    data.build(tmp_path / "cache")
    return data


def rows_of(cache: Path) -> dict[str, list[Any]]:
    opened = Cache.open(cache)
    table = opened.samples
    columns = [table[name] for name in table]
    return {
        path: [
            [column[at] for column in columns],
            [bytes(opened.reader.read(opened.index[opened.rows(variant, at)])) for variant in opened.manifest.variants],
        ]
        for at, path in enumerate(table.paths)
    }


@pytest.mark.parametrize("is_killed", [False, True])
def test_samples_that_became_sound_are_added_with_the_records_of_a_sound_source(
    is_killed: bool,
    data: Data,
    tmp_path: Path,
) -> None:
    cache, sound = tmp_path / "cache", Manifest.load(tmp_path / "sound")
    first = Manifest.load(cache)
    data.write(4, 7, 10)
    data.write(8, content=b"")
    assert data.build(cache) == first  # only with `retry`
    if is_killed:
        with pytest.raises(UnfinishedError, match="same command again"):
            data.build(cache, retry=True, time_limit=0)
        assert data.build(cache) == first
        with failing_rename("manifest.json", KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            data.build(cache, retry=True)
    partly = data.build(cache, retry=True)
    assert verify_cache(cache) == []
    assert (partly.number, [skip.number for skip in partly.skipped]) == (2, [0, 8])
    assert partly.skipped[0] == first.skipped[0]
    assert partly.skipped[1].reason != first.skipped[3].reason
    assert data.build(cache, retry=True) == partly  # nothing is new
    data.write(0, 8)
    whole = data.build(cache, retry=True)
    assert (whole.skipped, whole.statistics, whole.classes) == ((), sound.statistics, sound.classes)
    assert rows_of(cache) == rows_of(tmp_path / "sound")
    compact_cache(cache)
    assert digests(cache) == digests(tmp_path / "sound")


def test_a_cache_with_retried_samples_is_repaired(data: Data, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    data.write(*BAD)
    data.build(cache, retry=True)
    before = digests(cache)
    for name in ("index-1.npy", "v00-00001.lmdb", "v01-00000.lmdb"):
        (cache / name).write_bytes(b"damaged")
    repair_cache(TableSource(data.table, OPTIONS), cache, jobs=1, augment=data.recipe.augment)
    assert digests(cache) == before


def test_samples_are_added_and_tried_again_at_once(data: Data, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    data.write(*BAD)
    data.table.write_text(data.table.read_text() + "new.png,x,0,more\n")
    shutil.copy(data.root / "1.png", data.root / "new.png")
    manifest = data.build(cache, retry=True)
    assert (manifest.samples, manifest.skipped, verify_cache(cache)) == (COUNT + 1, (), [])
    names = {number: path for path, ((number, *_), _) in rows_of(cache).items()}
    assert names == {**{number: f"{number}.png" for number in range(COUNT)}, COUNT: "new.png"}


def test_skipped_samples_of_a_relabelled_cache_have_no_known_labels(data: Data, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    relabel_cache(cache, data.table, TableOptions(label_cols=("text",)))
    data.write(*BAD)
    before = digests(cache)
    with pytest.raises(SourceError, match="another label"):
        data.build(cache, retry=True)
    assert digests(cache) == before
