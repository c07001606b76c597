"""Versions of a cache: each reads as it was, whatever was added, deleted, relabelled or undone since."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made import build_here, write_rows
from PIL import Image

from tpucache import CachedDataset, CachedLoader, Manifest, Recipe, repair_cache, stage_cache, verify_cache
from tpucache.cli import main, make_parser
from tpucache.errors import BuildError, DamageError, FormatError, SourceError, StoreError, TpucacheError, UsageError
from tpucache.publish.transfer import fetch_cache, push_cache
from tpucache.store.cache import Cache
from tpucache.store.history import load_version, split_version, version_files
from tpucache.training.weights import load_checkpoint
from tpucache.warmup import TableOptions, compact_cache, delete_samples, relabel_cache, undo_delete
from tpucache.warmup.run.folder import hold

RECIPE = Recipe(size=8, codec="png")
COUNT = 24


def draw(source: Path, name: str, seed: int) -> None:
    path = source / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("versions")
    for number in range(COUNT):
        draw(root / "source", f"{'ab'[number % 2]}/{number:02}.png", number)
    build_here(root / "source", root / "cache", RECIPE)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "root")


def contents(cache: str | Path, version: int | None = None) -> dict[str, Any]:
    with CachedDataset(cache, version=version, in_memory=False) as dataset:
        shown = {
            path: (dataset.classes[int(label)], np.asarray(image).tobytes())
            for path, (image, label) in zip(dataset.paths, dataset, strict=True)
        }
        return {"shown": shown, "digest": dataset.digest, "identity": dataset.manifest.identity}


def relabel(cache: Path, labels: Callable[[int], str]) -> None:
    rows = [f"{path},{labels(number)}" for number, path in enumerate(CachedDataset(cache).paths)]
    table = cache.parent / "labels.csv"
    write_rows(table, "path,kind", *rows)
    relabel_cache(cache, table, TableOptions(label_cols=("kind",)))


def test_a_deleted_sample_is_gone_at_once_and_every_other_stays(root: Path) -> None:
    cache = root / "cache"
    before, shards = contents(cache), {path.name: path.read_bytes() for path in cache.glob("*.lmdb")}
    manifest = delete_samples(cache, where="path == 'a/02.png' or class == 'b' and path < 'b/06'")
    gone = {"a/02.png", "b/01.png", "b/03.png", "b/05.png"}
    after = contents(cache)
    assert after["shown"] == {path: shown for path, shown in before["shown"].items() if path not in gone}
    assert {each.path for each in manifest.deleted} == gone
    assert verify_cache(cache) == []
    assert {path.name: path.read_bytes() for path in cache.glob("*.lmdb")} == shards
    assert contents(cache, 1) == before
    assert len({before["digest"], after["digest"]}) == len({before["identity"], after["identity"]}) == 2
    assert before["identity"] != manifest.fingerprint != Manifest.load(root / "cache").identity
    labels = [int(labels) for _, batch in CachedLoader(CachedDataset(cache), 5, drop_last=False) for labels in batch]
    assert sorted(labels) == [0] * 11 + [1] * 9
    assert manifest.statistics.class_counts == (11, 9)
    # Deleted samples do not come back by a warmup, whether the source still has them or not.
    (root / "source" / "a/02.png").unlink()
    draw(root / "source", "a/new.png", 99)
    assert build_here(root / "source", cache, RECIPE).samples == COUNT - 3
    assert gone.isdisjoint(contents(cache)["shown"])
    assert verify_cache(cache) == []


def test_digests_differ_where_other_samples_of_the_same_labels_were_deleted(root: Path) -> None:
    digests = set()
    for path in ("a/00.png", "a/02.png"):
        cache = shutil.copytree(root / "cache", root / path.replace("/", " "))
        manifest = delete_samples(cache, paths=[path])
        dataset = CachedDataset(cache)
        digests |= {dataset.digest, manifest.fingerprint, manifest.identity}
    assert len(digests) == 6
    state = CachedLoader(dataset, 5, shuffle=True).state_dict()
    with pytest.raises(UsageError, match="the state cannot be continued here"):
        CachedLoader(CachedDataset(root / "a 00.png"), 5, shuffle=True).load_state_dict(state)
    CachedLoader(CachedDataset(cache, version=2), 5, shuffle=True).load_state_dict(state)


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 3)),
        st.tuples(st.just("delete"), st.integers(0, 1000)),
        st.tuples(st.just("relabel"), st.integers(1, 5)),
        st.tuples(st.just("undo"), st.just(0)),
        st.tuples(st.just("compact"), st.just(0)),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.thorough
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES)
def test_each_version_reads_as_it_was_whatever_came_after(
    made: Path, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int]]
) -> None:
    root = shutil.copytree(made, tmp_path_factory.mktemp("changes") / "root")
    cache, was, added = root / "cache", {}, 0
    is_relabelled = False
    was[1] = contents(cache)
    for what, value in changes:
        shown = dict(was[max(was)]["shown"])
        try:
            if what == "add":
                for _ in range(value):
                    added += 1
                    draw(root / "source", f"a/new{added:02}.png", 100 + added)
                build_here(root / "source", cache, RECIPE)
            elif what == "delete":
                rng = np.random.default_rng(value)
                gone = rng.choice(list(shown), 1 + value % 3, replace=False).tolist()
                delete_samples(cache, paths=gone)
                assert contents(cache)["shown"] == {path: item for path, item in shown.items() if path not in gone}
            elif what == "relabel":
                relabel(cache, lambda number, value=value: f"k{number % value}")  # type: ignore[misc]
                is_relabelled = True
            elif what == "undo":
                before = load_version(cache, max(was)).history
                undo_delete(cache)
                assert before is not None
                assert contents(cache)["shown"] in [each["shown"] for each in was.values()]
            else:
                compact_cache(cache)
                assert contents(cache)["shown"].items() == shown.items()
                was = {}
        except (UsageError, SourceError):
            # Nothing to undo; or labels of the source that are not those of the cache, where samples would be added.
            assert what == "undo" or is_relabelled
        number = Manifest.load(cache).number
        if number in was:
            assert contents(cache) == was[number]
        was[number] = contents(cache)
        assert list(was) == list(range(1, number + 1))
    assert verify_cache(cache) == []
    for number, expected in was.items():
        assert contents(cache, number) == expected
        assert contents(f"{cache}@{number}") == expected


def test_a_version_that_undoes_itself_is_refused(root: Path) -> None:
    cache = root / "cache"
    for path in ("a/02.png", "a/04.png"):
        manifest = delete_samples(cache, where=f"path == '{path}'")
    assert manifest.history is not None
    history = dataclasses.replace(manifest.history, command="delete --undo: as version 3")
    manifest.changed(history=history).save(cache)
    with pytest.raises(FormatError, match=r"version 3 of .* undoes a later one: copy the cache again"):
        undo_delete(cache)


def test_an_undo_equals_the_version_before_and_another_one_undoes_the_deletion_before(root: Path) -> None:
    cache = root / "cache"
    first = contents(cache)
    delete_samples(cache, paths=["a/00.png"])
    second = contents(cache)
    delete_samples(cache, paths=["a/02.png"])
    for expected, number in ((second, 4), (first, 5)):
        assert undo_delete(cache).number == number
        found = contents(cache)
        assert (found["shown"], found["digest"]) == (expected["shown"], expected["digest"])
    assert Manifest.load(cache).version == 6
    with pytest.raises(UsageError, match=r"no deletion to undo .* made by a warmup alone"):
        undo_delete(cache)
    assert verify_cache(cache) == []


def test_what_is_read_by_its_version_keeps_it_while_others_are_made(root: Path) -> None:
    cache = root / "cache"
    opened, expected = CachedDataset(cache), contents(cache)["shown"]
    delete_samples(cache, paths=["a/00.png"])
    relabel(cache, lambda number: f"k{number % 3}")
    assert {path: np.asarray(item[0]).tobytes() for path, item in zip(opened.paths, opened, strict=True)} == {
        path: picture for path, (_, picture) in expected.items()
    }


def test_a_reader_of_a_compacted_folder_gets_an_error_and_never_another_picture(root: Path) -> None:
    cache = root / "cache"
    delete_samples(cache, paths=["a/22.png"])  # the first records of the shard stay where they are
    draw(root / "source", "a/zz.png", 1)
    build_here(root / "source", cache, RECIPE)
    unread, read = CachedDataset(cache, in_memory=False), CachedDataset(cache, in_memory=False)
    shown = [np.asarray(read[number][0]).tobytes() for number in range(len(read))]
    compact_cache(cache)
    assert [np.asarray(read[number][0]).tobytes() for number in range(len(read))] == shown  # its files are open
    with pytest.raises(StoreError, match="was compacted or built again since it was opened here"):
        unread[0]


@pytest.mark.parametrize("recipe", [RECIPE, Recipe(size=8, codec="raw", max_blocks=3), Recipe(size=8, codec="zstd")])
def test_compact_writes_what_a_fresh_warmup_of_the_remaining_sources_writes(root: Path, recipe: Recipe) -> None:
    cache = root / "other"
    build_here(root / "source", cache, recipe)
    left = delete_samples(cache, paths=["a/00.png", "b/11.png", "b/23.png"]).statistics
    for name in ("a/00.png", "b/11.png", "b/23.png"):
        (root / "source" / name).unlink()
    assert left == build_here(root / "source", root / "left", recipe).statistics
    draw(root / "source", "a/05 new.png", 77)
    build_here(root / "source", cache, recipe)
    manifest, other = compact_cache(cache), root / "fresh"
    build_here(root / "source", other, recipe)
    assert sorted(path.name for path in cache.iterdir()) == sorted(path.name for path in other.iterdir())
    for path in other.iterdir():
        assert path.name == "manifest.json" or path.read_bytes() == (cache / path.name).read_bytes()
    # Of the sources' content it knows hashes of those alone that were compared before.
    found, expected = manifest.source, Manifest.load(other).source
    assert manifest.changed(source={}) == Manifest.load(other).changed(source={})
    assert {**found, "digests": 0} == {**expected, "digests": 0}
    assert verify_cache(cache) == []
    assert compact_cache(cache) == manifest
    assert build_here(root / "source", cache, recipe) == manifest


def test_compact_keeps_the_numbers_by_which_augmented_variants_were_drawn(root: Path) -> None:
    cache, recipe = root / "other", Recipe(size=8, codec="raw", variants=1)
    build_here(root / "source", cache, recipe)

    def shown() -> dict[str, bytes]:
        dataset = CachedDataset(cache, 1)
        return {path: np.asarray(image).tobytes() for path, (image, _) in zip(dataset.paths, dataset, strict=True)}

    before = shown()
    delete_samples(cache, paths=["a/00.png", "b/11.png"])
    manifest = compact_cache(cache)
    assert [(each.number, each.path) for each in manifest.deleted] == [(0, ""), (17, "")]
    after = shown()
    assert after == {path: image for path, image in before.items() if path in after}
    assert len(after) == COUNT - 2
    assert verify_cache(cache) == []
    # What the source still has is a new sample now, as nothing is left by which it would be known.
    assert build_here(root / "source", cache, recipe).samples == COUNT
    assert verify_cache(cache) == []
    assert CachedDataset(cache).numbers.tolist()[-2:] == [24, 25]


def test_nothing_of_a_deleted_sample_is_left_after_compact(root: Path) -> None:
    cache = root / "cache"
    pixels = CachedDataset(cache)
    record = bytes(Cache.open(cache).reader.read(Cache.open(cache).index[np.array([0])][0]))
    assert pixels.paths[0] == "a/00.png"
    delete_samples(cache, paths=["a/00.png"])
    (cache / f"hashes-{'0' * 64}.npz").write_bytes(b"of a/00.png and others")

    def holds(text: bytes) -> list[str]:
        return [path.name for path in cache.iterdir() if text in path.read_bytes()]

    assert holds(b"a/00.png")
    assert holds(record)
    compact_cache(cache)
    assert holds(b"a/00.png") == holds(record) == []


@pytest.fixture
def three(root: Path) -> Path:
    cache = root / "cache"
    delete_samples(cache, paths=["a/00.png", "b/11.png"])
    draw(root / "source", "a/new.png", 5)
    build_here(root / "source", cache, RECIPE)
    return cache


@pytest.mark.parametrize("harm", ["missing", "changed", "swapped"])
def test_a_version_before_that_is_damaged_is_refused_by_name(three: Path, harm: str) -> None:
    path = three / "version-1.json"
    if harm == "missing":
        path.unlink()
    elif harm == "changed":
        path.write_bytes(path.read_bytes().replace(b'"samples": 24', b'"samples": 23'))
    else:
        path.write_bytes((three / "version-2.json").read_bytes())
    assert len(CachedDataset(three)) == COUNT - 1
    assert len(CachedDataset(three, version=2)) == COUNT - 2
    with pytest.raises((DamageError, FormatError), match=r"version-1\.json"):
        CachedDataset(three, version=1)
    assert [damage.name for damage in verify_cache(three)] == ["version-1.json"]
    for send in (
        lambda: push_cache(three, str(three.parent / "there")),
        lambda: fetch_cache(str(three), three.parent / "here"),
    ):
        with pytest.raises((DamageError, FormatError), match=r"version-1\.json"):
            send()
    # Nothing that an earlier version may need is removed meanwhile.
    names = {each.name for each in three.iterdir()}
    delete_samples(three, paths=["a/02.png"])
    assert names <= {each.name for each in three.iterdir()}


def test_damaged_files_of_an_earlier_version_are_found(three: Path) -> None:
    for name in ("index.npy", "samples-1.npz"):
        data = bytearray((three / name).read_bytes())
        data[-1] ^= 1
        (three / name).write_bytes(data)
    assert sorted(damage.name for damage in verify_cache(three)) == ["index.npy", "samples-1.npz"]


def test_files_of_another_cache_are_not_those_of_a_version(root: Path) -> None:
    cache, other = root / "cache", root / "other"
    for number in range(COUNT):
        draw(root / "others", f"{'ab'[number % 2]}/{number:02}.png", 100 + number)
    build_here(root / "others", other, RECIPE)
    for folder in (cache, other):
        delete_samples(folder, paths=["a/02.png"])
    for path in (*other.glob("index*.npy"), *other.glob("*.lmdb")):
        shutil.copy(path, cache / path.name)
    assert len(verify_cache(cache)) == 3
    for change in (undo_delete, compact_cache):
        with pytest.raises(DamageError, match=r"index(-1)?\.npy is not the file"):
            change(cache)


def test_a_shard_with_records_of_deleted_samples_is_repaired_byte_for_byte(three: Path) -> None:
    (shard,) = [each for each in Manifest.load(three).shards if each.deleted]
    data = (three / shard.name).read_bytes()
    for damage in (data[:-4096], b""):
        (three / shard.name).write_bytes(damage)
        (three / Manifest.load(three).index.name).unlink()
        repair_cache(three.parent / "source", three, jobs=1)
        assert (three / shard.name).read_bytes() == data
        assert verify_cache(three) == []


def test_a_version_that_there_is_not_is_refused(three: Path) -> None:
    for number in (4, 99):
        with pytest.raises(UsageError, match=rf"has versions 1 to 3, and no version {number}"):
            CachedDataset(three, version=number)
    with pytest.raises(UsageError, match="a version is a whole number from 1 to 999,999, not 0"):
        CachedDataset(three, version=0)
    with pytest.raises(UsageError, match="names version 2, and version 3 is asked for"):
        CachedDataset(f"{three}@2", version=3)


def test_a_folder_of_that_very_name_is_no_version(three: Path) -> None:
    other = three.with_name("cache@2")
    shutil.copytree(three, other)
    assert split_version(other) == (str(other), None)
    assert len(CachedDataset(other)) == COUNT - 1
    assert len(CachedDataset(f"{other}@1")) == COUNT


def test_changes_are_refused_while_somebody_else_writes(three: Path) -> None:
    source = three.parent / "source"
    draw(source, "a/newer.png", 6)
    new, damaged = three.parent / "new", shutil.copytree(three, three.parent / "damaged")
    (damaged / "v00-00000.lmdb").unlink()
    for cache in (three, new, damaged):
        (cache / ".warmup").mkdir(parents=True)
    before = {path.name: path.read_bytes() for path in three.iterdir() if path.is_file()}
    with hold(three / ".warmup"), hold(new / ".warmup"), hold(damaged / ".warmup"):
        for change in (
            lambda: build_here(source, three, RECIPE),
            lambda: build_here(source, new, RECIPE),
            lambda: repair_cache(source, damaged, jobs=1),
            lambda: relabel(three, str),
            lambda: delete_samples(three, paths=["a/02.png"]),
            lambda: undo_delete(three),
            lambda: compact_cache(three),
        ):
            with pytest.raises(BuildError, match="another process is writing"):
                change()
    assert {path.name: path.read_bytes() for path in three.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("chosen", "error"),
    [
        ({"paths": ["a/00.png"]}, "has no samples for 1 of 1 paths .*deleted already"),
        ({"paths": ["a/02.png", "x"]}, "no samples for 1 of 2 paths: 'x'. Nothing is deleted"),
        ({"paths": []}, "no sample of .* was selected"),
        ({"where": "path == 'none'"}, "no sample of .* was selected"),
        ({"where": "path > ''"}, "all samples of .* were selected"),
        ({"where": "oops > 1"}, "oops"),
        ({}, "give either a condition \\(where\\) or paths"),
        ({"where": "path > ''", "paths": []}, "give either a condition \\(where\\) or paths"),
    ],
)
def test_a_deletion_that_cannot_be_meant_changes_nothing(three: Path, chosen: Any, error: str) -> None:
    before = {path.name: path.read_bytes() for path in three.iterdir()}
    with pytest.raises(TpucacheError, match=error):
        delete_samples(three, **chosen)
    assert {path.name: path.read_bytes() for path in three.iterdir()} == before


def sent(target: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in target.iterdir()}


def test_push_and_fetch_copy_what_is_new_and_every_version_arrives(root: Path) -> None:
    cache, there, here = root / "cache", root / "there", root / "here"
    push_cache(cache, str(there))
    fetch_cache(str(there), here)
    expected = {1: contents(cache)}
    delete_samples(cache, paths=["a/00.png"])
    expected[2] = contents(cache)
    draw(root / "source", "a/new.png", 5)
    build_here(root / "source", cache, RECIPE)
    expected[3] = contents(cache)
    before = [sent(there), sent(here)]
    push_cache(cache, str(there))
    fetch_cache(str(there), here)
    for target, was in zip((there, here), before, strict=True):
        assert {name for name, state in was.items() if sent(target)[name] != state} == {"manifest.json"}
        assert verify_cache(target) == []
        assert {number: contents(target, number) for number in expected} == expected
        assert sorted(path.name for path in target.iterdir()) == sorted(path.name for path in cache.iterdir())
    # A version can be copied alone, with those before it; a later one does not give way to it.
    fetch_cache(f"{there}@2", root / "second")
    assert contents(root / "second") == expected[2]
    assert verify_cache(root / "second") == []
    push_cache(f"{cache}@2", str(root / "pushed"))
    assert contents(root / "pushed") == expected[2]
    with pytest.raises(UsageError, match="holds another cache"):
        push_cache(f"{cache}@2", str(there))
    push_cache(cache, str(root / "pushed"))
    assert contents(root / "pushed") == expected[3]
    assert contents(stage_cache(f"{cache}@2", root / "staged"))["shown"] == expected[2]["shown"]


def test_versions_are_read_over_a_network_as_they_are_here(three: Path, tmp_path: Path) -> None:
    expected = {number: contents(three, number) for number in (1, 2, 3)}
    push_cache(three, "memory://versions/cache")
    for number, found in expected.items():
        for place in (three, "memory://versions/cache"):
            with CachedDataset(place, version=number, cache_dir=tmp_path / "kept") as dataset:
                shown = {
                    path: np.asarray(image).tobytes() for path, (image, _) in zip(dataset.paths, dataset, strict=True)
                }
                assert shown == {path: picture for path, (_, picture) in found["shown"].items()}
                assert dataset.place.endswith(f"@{number}")
                assert [each.number for each in dataset.cache.versions()[0]] == [*range(1, number + 1)]
    with pytest.raises(UsageError, match="has versions 1 to 3, and no version 4"):
        CachedDataset("memory://versions/cache@4", cache_dir=tmp_path / "kept")


def test_large_records_of_deleted_samples_may_lie_between_others_over_a_network(root: Path, tmp_path: Path) -> None:
    cache, recipe = root / "large", Recipe(size=160, codec="raw")
    build_here(root / "source", cache, recipe)
    kept = CachedDataset(cache).paths[::8]
    delete_samples(cache, paths=[path for path in CachedDataset(cache).paths if path not in kept])
    here = [np.asarray(image).tobytes() for image, _ in CachedDataset(cache)]
    with CachedDataset(cache, cache_dir=tmp_path / "kept") as dataset:
        assert [np.asarray(image).tobytes() for image, _ in dataset] == here
        assert dataset.paths == kept


def test_skipped_samples_that_are_tried_again_make_versions(root: Path) -> None:
    source, cache = root / "source", root / "other"
    for name in ("a/bad1.png", "a/bad2.png"):
        (source / name).write_bytes(b"no picture")
    build_here(source, cache, RECIPE, on_error="skip")
    expected = {1: contents(cache)}
    draw(source, "b/more.png", 3)
    build_here(source, cache, RECIPE)
    for number, name in enumerate(("a/bad1.png", "a/bad2.png"), 3):
        draw(source, name, 50)
        assert build_here(source, cache, RECIPE, retry=True).number == number
        assert contents(cache, 1) == expected[1]
        assert verify_cache(cache) == []
    assert len(contents(cache)["shown"]) == COUNT + 3
    delete_samples(cache, paths=["a/00.png"])
    assert contents(cache, 1) == expected[1]


def test_another_history_of_the_same_cache_is_not_mixed_in(root: Path) -> None:
    cache, other = root / "cache", shutil.copytree(root / "cache", root / "other")
    delete_samples(cache, paths=["a/00.png"])
    delete_samples(other, paths=["a/02.png"])
    push_cache(cache, str(root / "there"))
    with pytest.raises(UsageError, match="holds another cache"):
        push_cache(other, str(root / "there"))
    with pytest.raises(UsageError, match="holds another cache"):
        fetch_cache(str(other), cache)
    assert verify_cache(root / "there") == verify_cache(cache) == []


def test_a_cache_of_one_version_has_no_new_key_and_no_new_file(made: Path) -> None:
    cache = made / "cache"
    assert {"deleted", "history"}.isdisjoint(json.loads((cache / "manifest.json").read_bytes()))
    assert {path.name for path in cache.iterdir()} == {"manifest.json", *(e.name for e in Manifest.load(cache).files)}
    assert all("deleted" not in entry for entry in json.loads((cache / "manifest.json").read_bytes())["shards"])


def test_the_same_changes_make_the_same_bytes(root: Path) -> None:
    caches = [root / "cache", shutil.copytree(root / "cache", root / "again")]
    for cache in caches:
        delete_samples(cache, where="path == 'a/00.png'")
        relabel(cache, lambda number: f"k{number % 2}")
        undone = [path.name for path in cache.iterdir()]
    names = set(undone) - {"times.json"}
    assert [(caches[0] / name).read_bytes() for name in names] == [(caches[1] / name).read_bytes() for name in names]
    assert {entry.name for entry in version_files(caches[0], Manifest.load(caches[0]))} | {"manifest.json"} == names


def test_a_staged_copy_of_a_version_is_a_whole_cache(three: Path, tmp_path: Path) -> None:
    for place in (three, f"{three}@2"):
        copy = stage_cache(place, tmp_path / "fast")
        assert verify_cache(copy) == []
        assert len(Cache.open(copy).versions()[0]) == 1
        assert contents(copy)["shown"] == contents(place)["shown"]
        assert CachedDataset(copy).digest == CachedDataset(place).digest
        push_cache(copy, str(tmp_path / f"pushed {copy.name}"))
        assert stage_cache(place, tmp_path / "fast") == copy
    assert len([*(tmp_path / "fast").iterdir()]) == 2


_PUBLISHED = ("--id", "ann/birds-at-8", "--title", "Birds-at-8", "--license", "CC0-1.0", "--dry-run")
#: How each argument of a command that is a cache is given version 2, and whether it only reads. None: what has a test
#: of its own, or is no cache of which there are versions. {photos} is a source, {new} a place to write to.
_TAKEN: dict[str, list[str] | None] = {
    "warmup CACHE": ["warmup", "{photos}", "{two}"],
    "warmup --classes": ["warmup", "{photos}", "{new}", "--classes", "{two}", "--size", "8", "--jobs", "1"],
    "warmup --like": ["warmup", "{photos}", "{new}", "--like", "{two}", "--jobs", "1"],
    "relabel CACHE": ["relabel", "{two}", "{table}", "--label-col", "kind"],
    "relabel --classes": ["relabel", "{cache}", "{table}", "--label-col", "kind", "--classes", "{two}"],
    "delete CACHE": ["delete", "{two}", "--where", "class == 'a'"],
    "compact CACHE": ["compact", "{two}"],
    "verify CACHE": ["verify", "{two}"],
    "inspect CACHE": ["inspect", "{two}"],
    "preview CACHE": ["preview", "{two}", "-o", "{new}.png"],
    "report CACHE|RUN": ["report", "{two}", "-o", "{new}.html"],
    "report --valid": None,  # by the same function as --against
    "report --against": ["report", "{cache}", "--findings", "--against", "{two}", "-o", "{new}.html"],
    "bench CACHE": None,  # which measures for seconds; it reads as `preview` does
    "compare CACHE": ["compare", "{cache}", "{two}"],
    "train CACHE": None,
    "train --valid": None,
    "train --classes": None,
    "train --cache": None,
    "predict CACHE": None,
    "publish CACHE": ["publish", "{two}", *_PUBLISHED],
    "push CACHE": ["push", "{two}", "{new}"],
    "push URL": ["push", "{cache}", "{two}"],
    "fetch URL": ["fetch", "{two}", "{new}"],
    "fetch DIR": ["fetch", "{cache}", "{two}"],
}
_REFUSED = {"warmup CACHE", "relabel CACHE", "delete CACHE", "compact CACHE", "push URL", "fetch DIR"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name == "publish CACHE" else ())
        for name, words in _TAKEN.items()
        if words
    ],
)
def test_every_command_takes_a_version_or_refuses_it_in_one_line(
    name: str, three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("path,kind\n" + "".join(f"{path},a\n" for path in CachedDataset(three).paths))
    before = {path: path.read_bytes() for path in three.iterdir()}
    places = {"two": f"{three}@2", "cache": three, "photos": three.parent / "source", "new": tmp_path / "new"}
    status = main([word.format(**places, table=table) for word in _TAKEN[name] or ()])
    if name in _REFUSED:
        assert status == 2
        what = f"tpucache: {three}@2 is version 2 of {three}, and versions cannot be changed"
        assert capsys.readouterr().err == f"{what}: give {three}, or another place\n"
    else:
        assert status == (name == "compare CACHE")
    assert not three.with_name("cache@2").exists()
    if name != "relabel --classes":
        hashes = set(three.glob("hashes-*.npz"))  # which commands that compare pictures keep
        assert {path: path.read_bytes() for path in three.iterdir() if path not in hashes} == before


def test_no_command_takes_a_cache_that_the_test_above_does_not_know() -> None:
    taken = set()
    for command in make_parser().commands.values():
        taken |= {
            f"{command.prog.split()[-1]} {action.option_strings[0] if action.option_strings else action.metavar}"
            for action in command.actions
            if "CACHE" in str(action.metavar) or action.dest in ("url", "directory")
        }
    assert taken <= set(_TAKEN)


def test_train_reads_the_version_that_is_named(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")

    def train(run: str, version: str, *words: str) -> int:
        command = ["train", f"{three}{version}", "--run", str(tmp_path / run), "--backend", "torch", "--model", "cnn"]
        return main([*command, "--json", "--epochs", "1", "--batch-size", "11", *words])

    assert train("second", "@2") == 0
    capsys.readouterr()
    state = load_checkpoint(tmp_path / "second" / "last.pt")
    assert (state["samples"], state["fingerprint"]) == (22, load_version(three, 2).fingerprint)
    assert train("second", "", "--resume") == 2
    assert "give the version that the run began on: CACHE@N" in capsys.readouterr().err
    assert train("other", "@9") == 2
    assert "has versions 1 to 3, and no version 9" in capsys.readouterr().err
    predictions = tmp_path / "predictions.csv"
    assert main(["predict", str(tmp_path / "second"), f"{three}@2", "-o", str(predictions), "--backend", "torch"]) == 0
    assert len(predictions.read_text().splitlines()) == 1 + 22


def test_the_commands_say_what_each_version_is(three: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["inspect", str(three), "--versions", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)["versions"]
    assert [(each["version"], each["command"], each["samples"], each["changes"]) for each in versions] == [
        (1, "warmup", 24, []),
        (2, "delete --paths", 22, ["-2 samples"]),
        (3, "warmup", 23, ["+1 samples"]),
    ]
    assert [bool(each["time"]) for each in versions] == [False, True, True]
    assert main(["inspect", f"{three}@2", "--json"]) == 0
    assert (found := json.loads(capsys.readouterr().out))["samples"] == 22
    assert (found["version"], found["deleted"]) == (2, 2)
    listed = tmp_path / "gone.txt"
    listed.write_text("a/02.png\n\nb/01.png\n")
    assert main(["delete", str(three), "--paths", str(listed)]) == 0
    assert "version 4 has 21 samples, 4 are deleted" in capsys.readouterr().out
    assert main(["delete", str(three), "--undo"]) == 0
    assert main(["inspect", str(three), "--versions"]) == 0
    assert "+2 samples" in capsys.readouterr().out.splitlines()[-1]
    assert main(["verify", f"{three}@2"]) == 0
    assert main(["delete", str(three), "--where", "class == 'a'", "--undo"]) == 2
    capsys.readouterr()
    assert main(["compare", f"{three}@1", f"{three}@2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["exact"]["count"] == 22
    assert main(["compact", str(three), "--json"]) == 0
    assert main(["delete", f"{three}@1", "--undo"]) == 2
