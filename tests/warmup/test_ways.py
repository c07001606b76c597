"""In whatever way a cache is built, it has the same bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import Made, build_here, digests
from stops import Stopped, stop_after
from thorough import thorough

from tpucache.errors import SampleError, UnfinishedError
from tpucache.progress import BuildProgress
from tpucache.recipe import Recipe
from tpucache.store.format import WORK_NAME
from tpucache.store.growing import Prospect, ask_for
from tpucache.store.verify import verify_cache
from tpucache.warmup.build import build_cache
from tpucache.warmup.growing import build_for_readers
from tpucache.warmup.sources.source import Item

COUNT, SIDE = 160, 96  # with one megabyte a shard, six blocks
BAD = (0, *range(32, 64), 101, 159)  # one of them a block of nothing else


def pictures(nbytes: int = 1000, broken: tuple[int, ...] = (), is_listed: bool = False) -> Made:
    def item(number: int) -> Item:
        columns = {"rank": number, **({"weight": number / 4} if number % 5 else {})}
        pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        return Item({"image": pixels}, None if is_listed else number % 3, columns)

    facts = {"classes": ("ant", "bee", "cat")}
    return Made(COUNT, item, lambda at: at % 3 if is_listed else None, "{:03}.png", nbytes, broken, facts)


def stop_at(reports: int) -> Callable[[BuildProgress], None]:
    seen: list[int] = []

    def look(progress: BuildProgress) -> None:
        seen.append(progress.samples)
        assert seen == sorted(seen)
        if len(seen) == reports:
            raise Stopped

    return look


def stopped(source: Any, cache: Path, recipe: Recipe, harm: Callable[[Path], None] | None = None, **how: Any) -> None:
    for reports in (2, 5, 9, 3):
        try:
            build_here(source, cache, recipe, on_progress=stop_at(reports), **how)
        except Stopped:
            if harm is not None:
                harm(cache / WORK_NAME)
        else:  # blocks that are built whole report a few times only
            return
    build_here(source, cache, recipe, **how)


def late(source: Any, cache: Path, recipe: Recipe, **how: Any) -> None:
    with pytest.raises(UnfinishedError, match="time limit"):
        build_here(source, cache, recipe, time_limit=0, **how)
    build_here(source, cache, recipe, **how)


def followed(source: Any, cache: Path, recipe: Recipe, **how: Any) -> None:
    if how:  # which samples are skipped is known at the end alone
        pytest.skip("no reader")

    def ask(_: Prospect) -> None:
        ask_for(cache / WORK_NAME, np.arange(COUNT)[::-1])

    with pytest.raises(Stopped):
        build_for_readers(source, cache, ask, recipe=recipe, jobs=1, on_progress=stop_after(20))
    build_for_readers(source, cache, ask, recipe=recipe, jobs=1)


def begun_without_readers(source: Any, cache: Path, recipe: Recipe, **how: Any) -> None:
    with pytest.raises(Stopped):
        build_here(source, cache, recipe, on_progress=stop_after(20), **how)
    if how:
        pytest.skip("no reader")
    build_for_readers(source, cache, lambda _: None, recipe=recipe, jobs=1)


def flip_each(work: Path) -> None:
    for path in [*work.glob("spool-*"), *work.glob("arrived.jsonl"), *work.glob("shard-*.npz")]:
        data = bytearray(path.read_bytes())
        if data:
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


def tear_each(work: Path) -> None:
    for path in [*work.glob("spool-*"), *work.glob("*.bin"), *work.glob("arrived.jsonl"), *work.glob("shard-*.npz")]:
        os.truncate(path, path.stat().st_size // 3)


def lose_shards(work: Path) -> None:
    for path in sorted(work.parent.glob("*.lmdb"))[::2]:
        path.unlink()


WAYS: dict[str, Callable[..., None]] = {
    "two workers": lambda *what, **how: build_cache(*what, jobs=2, **how) and None,
    "stopped": stopped,
    "time limit": late,
    "bits flipped": lambda *what, **how: stopped(*what, harm=flip_each, **how),
    "files torn": lambda *what, **how: stopped(*what, harm=tear_each, **how),
    "shards lost": lambda *what, **how: stopped(*what, harm=lose_shards, **how),
    "followed": followed,
    "begun without readers": begun_without_readers,
}
#: Blocks that are built whole, blocks whose records are spooled, several variants, and samples that are skipped.
KINDS: dict[str, tuple[Made, int, dict[str, Any]]] = {
    "whole": (pictures(is_listed=True), 0, {}),
    "spooled": (pictures(nbytes=0), 0, {}),
    "variants": (pictures(nbytes=0, is_listed=True), 2, {}),
    "skipped": (pictures(nbytes=0, broken=BAD), 0, {"on_error": "skip"}),
}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "ways_by_test.py").write_text(
        "def noisy(image, generator):\n    return image ^ generator.integers(0, 8, image.shape).astype(image.dtype)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "ways_by_test:noisy"


def recipe_of(variants: int, module: str) -> Recipe:
    return Recipe(size=SIDE, shard_mb=1, variants=variants, augment=module)


@pytest.fixture(scope="module")
def expected(module: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, dict[str, str]] = {}

    def files(kind: str) -> dict[str, str]:
        if kind not in made:
            source, variants, how = KINDS[kind]
            cache = tmp_path_factory.mktemp(kind) / "cache"
            manifest = build_here(source, cache, recipe_of(variants, module), **how)
            assert len(manifest.shards) == 5 * (variants + 1)
            assert [skip.number for skip in manifest.skipped] == [*source.broken]
            made[kind] = digests(cache)
        return made[kind]

    return files


QUICK = [(way, "variants") for way in WAYS if way != "two workers"] + [("stopped", kind) for kind in KINDS]
OTHERS = [(way, kind) for way in WAYS for kind in KINDS if (way, kind) not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), [*dict.fromkeys(QUICK), *thorough(*OTHERS)])
def test_every_way_gives_the_same_bytes(way: str, kind: str, tmp_path: Path, module: str, expected: Any) -> None:
    source, variants, how = KINDS[kind]
    wanted = expected(kind)
    cache = tmp_path / "cache"
    WAYS[way](source, cache, recipe_of(variants, module), **how)
    assert verify_cache(cache) == []
    assert digests(cache) == wanted


@pytest.mark.slow
def test_what_is_built_is_not_built_again(module: str, tmp_path: Path) -> None:
    source, recipe = pictures(nbytes=0, is_listed=True), recipe_of(1, module)
    with pytest.raises(Stopped):
        build_here(source, tmp_path / "cache", recipe, on_progress=stop_after(60))
    done = len({*source.loaded})
    source.loaded.clear()
    build_here(source, tmp_path / "cache", recipe)
    assert COUNT - done <= len(source.loaded) <= COUNT - done + 12  # a few are compared
    assert not (tmp_path / "cache" / WORK_NAME).exists()


@pytest.mark.slow
def test_records_take_room_for_a_few_blocks_only(module: str, tmp_path: Path) -> None:
    most: list[int] = []

    def look(_: BuildProgress) -> None:
        most.append(sum(path.stat().st_size for path in (tmp_path / "cache" / WORK_NAME).glob("spool-*")))

    build_here(pictures(nbytes=0), tmp_path / "cache", recipe_of(0, module), on_progress=look)
    assert max(most) <= 2 * 1.1 * COUNT * SIDE * SIDE * 3 / 5


def test_where_samples_may_not_be_skipped_those_skipped_before_are_tried(tmp_path: Path) -> None:
    source, cache, recipe = pictures(nbytes=0, broken=(1,)), tmp_path / "cache", Recipe(size=SIDE, shard_mb=1)
    with pytest.raises(Stopped):
        build_here(source, cache, recipe, on_error="skip", on_progress=stop_after(60))
    with pytest.raises(SampleError, match="is broken"):
        build_here(source, cache, recipe)
    assert build_here(pictures(nbytes=0), cache, recipe).samples == COUNT


@pytest.mark.slow
def test_a_shard_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync, cache = set[int](), os.fsync, tmp_path / "cache"

    def note(descriptor: int) -> None:
        assert {path.stat().st_ino for path in cache.glob("*.lmdb")} <= synced
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    build_here(pictures(nbytes=0), cache, Recipe(size=SIDE, shard_mb=1))
    assert len({path.stat().st_ino for path in cache.glob("*.lmdb")} & synced) == 5
