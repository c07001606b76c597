"""Repair: what is damaged, and nothing else, is built again, and the cache ends with the bytes it had."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from joblib.externals.loky import get_reusable_executor
from made import Made, build_here, digests, failing_rename, flip, write_photos, write_rows
from signed import signed
from stops import Stopped, stop_after

from tpucache import Manifest, Recipe, verify_cache
from tpucache import repair_cache as repair_cache_of
from tpucache.cli import main
from tpucache.errors import DamageError, FormatError, RecipeError, SourceError
from tpucache.store.format import INDEX_NAME, TIMES_NAME
from tpucache.store.hashes import hashes_name
from tpucache.warmup.sources import TableOptions, TableSource
from tpucache.warmup.sources.source import Item

Harm = Callable[[Path], None]


def repair_cache(source: Any, cache: Path, **options: Any) -> list[Any]:
    return repair_cache_of(source, cache, augment="moved_by_test:shift", **{"jobs": 1, **options})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


HARMS: dict[str, Harm] = {"flipped": flip, "cut": cut, "gone": Path.unlink}


def identities(cache: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cache.iterdir()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of which two are none, and later more of them, so that some sort before all others."""
    root = write_photos(tmp_path_factory.mktemp("repaired") / "photos", 130, size=(30, 24))
    (root / "cat" / "0000bad.jpg").write_bytes(b"no image")
    (root / "emu" / "bad.jpg").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "moved_by_test.py").write_text(
        "def shift(image, generator):\n    return image ^ generator.integers(0, 9, image.shape).astype(image.dtype)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        get_reusable_executor().shutdown(wait=True)  # an earlier test's workers do not know this folder
        yield folder


@pytest.fixture(scope="module")
def grown(source: Path, modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("grown") / "cache"
    recipe = Recipe(size=16, variants=1, augment="moved_by_test:shift")
    build_here(source, cache, recipe, on_error="skip")
    (source / "ant").mkdir()
    for number, path in enumerate(sorted((source / "dog").iterdir())):
        shutil.copy(path, source / ("ant" if number % 2 else "dog") / f"more{number}.jpg")
    build_here(source, cache, recipe, on_error="skip")
    build_here(source, cache, Recipe(size=16, variants=2, augment="moved_by_test:shift"))
    assert Manifest.load(cache).generation == 2
    assert len(Manifest.load(cache).skipped) == 2
    return cache


@pytest.fixture
def cache(grown: Path, tmp_path: Path) -> Path:
    return shutil.copytree(grown, tmp_path / "cache")


HARMED = [
    (("v00-00000.lmdb",), "flipped"),
    (("v00-00003.lmdb", "v02-00001.lmdb"), "cut"),
    (("index-2.npy",), "gone"),
    (("v01-00001.lmdb", "v02-00002.lmdb", "index-2.npy"), "flipped"),
    *((("v00-00002.lmdb", "v01-00000.lmdb", "index-2.npy"), harm) for harm in HARMS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "harm"), HARMED, ids=lambda each: each if isinstance(each, str) else ",".join(each))
def test_what_is_damaged_comes_back_and_nothing_else_is_touched(
    source: Path, grown: Path, cache: Path, names: tuple[str, ...], harm: str
) -> None:
    existing = {name: known for name, known in identities(cache).items() if name not in names}
    for name in names:
        HARMS[harm](cache / name)
    damages = repair_cache(source, cache)
    assert {damage.name for damage in damages} == set(names)
    assert digests(cache) == digests(grown)
    assert existing.items() <= identities(cache).items()
    after = identities(cache)
    assert repair_cache(source, cache) == []
    assert identities(cache) == after


def test_a_samples_table_is_not_made_again(source: Path, cache: Path) -> None:
    flip(cache / "samples-2.npz")
    with pytest.raises(DamageError, match=r"samples-2\.npz cannot be built again: copy it"):
        repair_cache(source, cache)


@pytest.mark.slow
@pytest.mark.thorough
def test_all_shards_and_the_index_can_be_lost(source: Path, grown: Path, cache: Path) -> None:
    manifest = Manifest.load(cache)
    for entry in (*manifest.shards, manifest.index):
        (cache / entry.name).unlink()
    repair_cache(source, cache, jobs=2)
    assert digests(cache) == digests(grown)
    (cache / "version-1.json").unlink()
    with pytest.raises(DamageError, match=r"files of earlier versions are damaged: 'version-1\.json'"):
        repair_cache(source, cache, jobs=2)


@pytest.mark.slow
def test_samples_that_came_later_do_not_matter(source: Path, grown: Path, cache: Path, tmp_path: Path) -> None:
    more = shutil.copytree(source, tmp_path / "more")
    shutil.copy(sorted((source / "emu").glob("*.jpg"))[0], more / "ant" / "0.jpg")
    flip(cache / "v00-00000.lmdb")
    flip(cache / "v01-00003.lmdb")
    repair_cache(more, cache)
    assert digests(cache) == digests(grown)


def self_labelled(number: int) -> Item:
    score = {"score": number / 4} if number % 2 else {}
    return Item({"tokens": np.arange(number, number + 4)}, number % 3, score)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v00-00001.lmdb", INDEX_NAME])
def test_labels_known_only_from_samples_are_read_again(tmp_path: Path, name: str) -> None:
    build_here(Made(150, self_labelled), tmp_path)
    before = digests(tmp_path)
    (tmp_path / name).unlink()
    repair_cache(Made(150, self_labelled), tmp_path)
    assert digests(tmp_path) == before


@pytest.mark.slow
def test_a_source_that_is_not_the_caches_is_refused(source: Path, cache: Path, tmp_path: Path) -> None:
    flip(cache / "v00-00000.lmdb")
    before = digests(cache)
    other = shutil.copytree(source, tmp_path / "other")
    photo = sorted((other / "dog").iterdir())[3]
    data = photo.read_bytes()
    photo.write_bytes(data + b"x")
    with pytest.raises(SourceError, match=f"another size.*{photo.name}"):
        repair_cache(other, cache)
    photo.unlink()
    with pytest.raises(SourceError, match=f"1 gone: 'dog/{photo.name}'"):
        repair_cache(other, cache)
    (other / "cat" / photo.name).write_bytes(data)
    with pytest.raises(SourceError, match=f"1 gone: .*; 1 new: 'cat/{photo.name}'"):
        repair_cache(other, cache)
    assert digests(cache) == before


@pytest.mark.slow
def test_pixels_that_changed_in_secret_are_named_and_nothing_is_replaced(
    source: Path, grown: Path, cache: Path, tmp_path: Path
) -> None:
    flip(cache / "v01-00000.lmdb")
    flip(cache / "v00-00001.lmdb")
    before = digests(cache)
    other = shutil.copytree(source, tmp_path / "other")
    by_size = sorted((other / "cat").glob("*.jpg"), key=lambda path: path.stat().st_size)
    first = by_size[-1]
    first.write_bytes(by_size[len(by_size) // 2].read_bytes().ljust(first.stat().st_size, b"\0"))
    with pytest.raises(DamageError, match=rf"1 samples differ: 'cat/{first.name}'"):
        repair_cache(other, cache)
    assert digests(cache) == before
    repair_cache(source, cache)
    assert digests(cache) == digests(grown)


def test_versions_that_make_other_records_are_named(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(cache / "v00-00000.lmdb")
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["created_by"]["pillow"] = "0.1"
    entry = next(entry for entry in manifest["shards"] if entry["name"] == "v00-00000.lmdb")
    entry["sha256"] = entry["records_sha256"] = "0" * 64
    (cache / "manifest.json").write_text(signed(manifest))
    with pytest.raises(DamageError, match=r"v00-00000.*nothing is replaced.*pillow 0\.1, now"):
        repair_cache(source, cache)


def test_a_callable_that_changed_is_refused_where_it_matters(
    source: Path, cache: Path, grown: Path, modules: Path
) -> None:
    path = modules / "moved_by_test.py"
    text = path.read_text()
    path.write_text(text + "# changed\n")
    try:
        flip(cache / "v01-00000.lmdb")
        with pytest.raises(RecipeError, match="moved_by_test:shift has changed"):
            repair_cache(source, cache)
        shutil.copy(grown / "v01-00000.lmdb", cache / "v01-00000.lmdb")
        flip(cache / "v00-00000.lmdb")
        repair_cache(source, cache)
    finally:
        path.write_text(text)
    assert digests(cache) == digests(grown)


def test_a_damaged_manifest_is_not_repaired(source: Path, cache: Path) -> None:
    (cache / "manifest.json").write_text("{")
    with pytest.raises(FormatError, match="manifest cannot be repaired: copy it again"):
        repair_cache(source, cache)


def test_damaged_files_that_no_manifest_lists_are_removed(source: Path, cache: Path) -> None:
    before = digests(cache)
    flip(cache / TIMES_NAME)
    (cache / hashes_name(Manifest.load(cache))).write_bytes(b"no hashes")
    assert {damage.name for damage in verify_cache(cache)} == {TIMES_NAME, hashes_name(Manifest.load(cache))}
    assert {damage.name for damage in repair_cache(source, cache)} == {TIMES_NAME, hashes_name(Manifest.load(cache))}
    assert not (cache / TIMES_NAME).exists()
    assert verify_cache(cache) == []
    assert digests(cache) == before


def test_an_index_that_was_written_wrong_is_not_repaired(source: Path, cache: Path) -> None:
    import hashlib

    rows = np.load(cache / "index-2.npy")
    rows["crc32"][3] ^= 1
    np.save(cache / "index-2.npy", rows)
    manifest = json.loads((cache / "manifest.json").read_text())
    digest = hashlib.sha256((cache / "index-2.npy").read_bytes()).hexdigest()
    next(entry for entry in manifest["tables"] if entry["name"] == "index-2.npy")["sha256"] = digest
    (cache / "manifest.json").write_text(signed(manifest))
    with pytest.raises(DamageError, match="it was written so"):
        repair_cache(source, cache)


@pytest.mark.slow
def test_a_repair_that_was_stopped_continues_where_it_was(source: Path, grown: Path, cache: Path) -> None:
    for name in ("v00-00002.lmdb", "v01-00002.lmdb", "v02-00000.lmdb", "index-2.npy"):
        flip(cache / name)
    with pytest.raises(Stopped):
        repair_cache(source, cache, on_progress=stop_after(0))
    reports: list[int] = []
    repair_cache(source, cache, on_progress=lambda progress: reports.append(progress.samples))
    assert digests(cache) == digests(grown)
    assert reports[0] > 0, "what was finished was built again"


@pytest.mark.slow
def test_an_addition_that_is_not_finished_continues_after_a_repair(
    source: Path, modules: Path, cache: Path, tmp_path: Path
) -> None:
    recipe = Recipe(size=16, variants=3, augment="moved_by_test:shift")
    whole = shutil.copytree(cache, tmp_path / "whole")
    build_here(source, whole, recipe)
    with failing_rename("index-*.npy", KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        build_here(source, cache, recipe)
    flip(cache / "v00-00000.lmdb")
    repair_cache(source, cache)
    assert verify_cache(cache) == []
    assert (cache / ".warmup" / "plan.json").exists()
    reports: list[int] = []
    build_here(source, cache, recipe, on_progress=lambda progress: reports.append(progress.samples))
    assert reports[0] == Manifest.load(cache).samples, "what was added was built again"
    assert digests(cache) == digests(whole)


@pytest.mark.slow
@pytest.mark.parametrize("named", [None, "moved_by_test:other"])
def test_an_augmentation_that_a_manifest_names_is_imported_only_if_it_is_named_too(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str | None
) -> None:
    (tmp_path / "trap_by_test.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\ndef shift(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    manifest = cache / "manifest.json"
    manifest.write_text(signed(manifest.read_text().replace("moved_by_test:shift", "trap_by_test:shift")))
    flip(cache / "v00-00000.lmdb")
    repair_cache_of(source, cache, augment=named)  # the clean images are not augmented
    flip(cache / "v01-00000.lmdb")
    with pytest.raises(RecipeError, match=r"'trap_by_test:shift'.*add --augment trap_by_test:shift"):
        repair_cache_of(source, cache, augment=named)
    assert not (tmp_path / "imported").exists()


@pytest.mark.slow
def test_a_table_source_is_repaired_with_the_same_columns(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = sorted(path.relative_to(source).as_posix() for path in (source / "emu").glob("0*.jpg"))
    rows = [f"{path},{number % 3},{number / 8},note {number}" for number, path in enumerate(photos)]
    table, cache = tmp_path / "train.csv", tmp_path / "cache"
    write_rows(table, "file,fold,age,remark", *rows)
    options = TableOptions(label_cols=("age",), fold_col="fold", root=source)
    build_here(TableSource(table, options), cache)
    before = digests(cache)
    named = ["--build", f"--label-col age --fold-col fold --root {source}"]
    for names in (["v00-00000.lmdb"], ["index.npy", "v00-00000.lmdb"]):
        for name in names:
            (cache / name).unlink()
        assert main(["verify", str(cache), "--repair", str(table), *named, "--jobs", "1", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["ok"]
        assert report["repaired"] == sorted(names)
        assert digests(cache) == before
    assert main(["verify", str(cache), "--repair", str(table), *named]) == 0
    assert "all sound" in capsys.readouterr().out
    assert main(["verify", str(cache), *named]) == 2
    (cache / "index.npy").unlink()
    assert main(["verify", str(cache)]) == 1
    assert "--repair SOURCE" in capsys.readouterr().err
    (cache / "manifest.json").write_text("{}")
    assert main(["verify", str(cache), "--repair", str(table)]) == 1
    assert "cannot be repaired" in capsys.readouterr().err.splitlines()[-1]
