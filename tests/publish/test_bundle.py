"""The folder that is uploaded: it keeps Kaggle's rules, is a cache itself, and costs no second copy."""

from __future__ import annotations

import json
import logging
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tpucache import BuildError, CachedDataset, PublishError, Recipe, StoreError, UsageError, build_cache, verify_cache
from tpucache.cli import main
from tpucache.insight import hashes
from tpucache.kaggle import MAX_FILES, TARGET_SHARDS
from tpucache.publish.bundle import make_bundle
from tpucache.publish.rules import Metadata
from tpucache.store.hashes import hashes_name
from tpucache.store.manifest import Manifest
from tpucache.warmup.sources import open_source

ROOT = Path(__file__).parents[2]
METADATA = Metadata("ann/noise-at-16", "Noise at 16", "CC-BY-4.0")


def broken_rules(folder):
    """Check a folder by Kaggle's documentation of datasets and their metadata, apart from tpucache's own rules."""
    metadata = json.loads((folder / "dataset-metadata.json").read_text())
    owner, slug = metadata["id"].split("/")
    names = [path.name for path in folder.iterdir()]
    return [
        rule
        for rule, kept in {
            "flat": all(path.is_file() and not path.is_symlink() for path in folder.iterdir()),
            "at most 50 files": len(names) - 1 <= 50,
            "at most 45 shards": sum(name.endswith(".lmdb") for name in names) <= 45,
            "no archives": not any(re.search(r"\.(zip|tar|t?gz|bz2|xz|7z|rar|csv)$", name, re.I) for name in names),
            "no hidden or lock files": not any(name.startswith(".") or name.endswith("-lock") for name in names),
            "title": 6 <= len(metadata["title"]) <= 50,
            "slug": 6 <= len(slug) <= 50 and re.fullmatch("[a-z0-9-]+", slug) is not None and bool(owner),
            "one licence": [list(entry) for entry in metadata["licenses"]] == [["name"]],
            "description": metadata["description"].startswith("# "),
            "size": sum(path.stat().st_size for path in folder.iterdir()) < 200e9,
        }.items()
        if not kept
    ]


def test_hashes_are_published_only_when_they_are_asked_for(stored):
    name = hashes_name(Manifest.load(stored))
    hashes(stored)
    assert name not in make_bundle(stored, METADATA).files
    made = make_bundle(stored, METADATA, hashes=True)
    assert name in made.files
    assert broken_rules(made.folder) == []
    assert (made.folder / name).read_bytes() == (stored / name).read_bytes()
    assert name not in make_bundle(stored, METADATA).files
    assert not (made.folder / name).exists()


@pytest.mark.slow
def test_the_folder_keeps_kaggles_rules_and_is_a_cache(stored):
    made = make_bundle(stored, METADATA)
    assert made.folder == stored.with_name("stored.publish")
    assert broken_rules(made.folder) == []
    assert verify_cache(made.folder) == []
    assert len(CachedDataset(made.folder)) == 150
    names = {path.name for path in made.folder.iterdir()}
    assert names - {path.name for path in stored.iterdir()} == {
        "README.md", "sheet.png", "dataset-metadata.json"
    }  # fmt: skip
    assert made.files == {
        path.name: path.stat().st_size for path in made.folder.iterdir() if path.stem != "dataset-metadata"
    }
    metadata = json.loads((made.folder / "dataset-metadata.json").read_text())
    assert (metadata["id"], metadata["title"], metadata["licenses"]) == (
        "ann/noise-at-16",
        "Noise at 16",
        [{"name": "CC-BY-4.0"}],
    )
    assert "filling" not in json.dumps(metadata)


@pytest.mark.slow
def test_shards_are_linked_and_a_second_call_brings_the_folder_up_to_date(photos, tmp_path):
    stored = tmp_path / "stored"
    build_cache(photos, stored, Recipe(size=8), jobs=1)
    first = make_bundle(stored, METADATA)
    (first.folder / ".index.npy.7.tmp").write_bytes(b"what a killed process left")
    build_cache(photos, stored, Recipe(size=8, variants=1), jobs=1)
    second = make_bundle(stored, METADATA)
    assert make_bundle(stored, METADATA).files == second.files
    assert {path.name for path in second.folder.iterdir()} == {
        *(path.name for path in stored.iterdir()), "README.md", "sheet.png", "dataset-metadata.json"
    }  # fmt: skip
    assert verify_cache(second.folder) == []
    for entry in Manifest.load(stored).files:
        assert (stored / entry.name).samefile(second.folder / entry.name)


@pytest.mark.slow
def test_where_there_are_no_links_the_files_are_copied_and_that_is_said_once(stored, monkeypatch, caplog):
    monkeypatch.setattr("pathlib.Path.hardlink_to", lambda *_: (_ for _ in ()).throw(OSError("cross-device link")))
    with caplog.at_level(logging.WARNING):
        made = make_bundle(stored, METADATA)
    assert [record.message.partition(":")[2][:8] for record in caplog.records] == [" copying"]
    assert verify_cache(made.folder) == []
    assert not (stored / "index.npy").samefile(made.folder / "index.npy")


@pytest.mark.slow
@pytest.mark.parametrize("foreign", ["notes.txt", "sub/file"])
def test_a_folder_that_holds_anything_else_is_left_alone(stored, tmp_path, foreign):
    path = tmp_path / "out" / foreign
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    (tmp_path / "out" / "v00-99999.lmdb").write_bytes(b"mine")
    with pytest.raises(UsageError, match=f"holds {foreign.split('/')[0]}, v00-99999.lmdb, which"):
        make_bundle(stored, METADATA, tmp_path / "out")
    assert path.read_text() == "mine"
    assert (tmp_path / "out" / "v00-99999.lmdb").exists()


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_reported(stored, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match="--out"):
        make_bundle(stored, METADATA, tmp_path / "file" / "out")


def test_a_cache_without_images_or_classes_has_a_card_without_a_sheet(tmp_path, monkeypatch):
    tokens = types.ModuleType("words_by_test")
    tokens.make = lambda: [{"tokens": np.arange(4)}] * 3
    monkeypatch.setitem(sys.modules, tokens.__name__, tokens)
    build_cache(open_source("words_by_test:make"), tmp_path / "cache", Recipe(), jobs=1)
    made = make_bundle(tmp_path / "cache", METADATA)
    card = (made.folder / "README.md").read_text()
    assert "sheet.png" not in made.files
    assert "variant=0" in card
    assert "## Classes" not in card
    assert "mean, std" not in card
    assert broken_rules(made.folder) == []


@pytest.mark.slow
def test_what_the_target_allows_is_published_with_all_that_goes_with_it(photos, tmp_path):
    """One shard more leaves no room for hashes, two more are refused."""
    source = tmp_path / "photos"
    source.mkdir()
    for photo in sorted((photos / "ant").iterdir())[:2]:
        (source / photo.name).write_bytes(photo.read_bytes())
    cache, recipe = tmp_path / "cache", Recipe(size=8, variants=TARGET_SHARDS - 1)
    build_cache(source, cache, recipe, jobs=1, target="kaggle")
    assert len(Manifest.load(cache).shards) == TARGET_SHARDS
    made = make_bundle(cache, METADATA, hashes=True)
    assert len(made.files) == MAX_FILES
    assert broken_rules(made.folder) == []
    for shards in (TARGET_SHARDS + 1, TARGET_SHARDS + 2):
        recipe = Recipe(size=8, variants=shards - 1)
        with pytest.raises(BuildError, match=f"{TARGET_SHARDS}"):
            build_cache(source, cache, recipe, jobs=1, target="kaggle")
        build_cache(source, cache, recipe, jobs=1)
        with pytest.raises(BuildError, match=f"{TARGET_SHARDS}"):  # finished as it is
            build_cache(source, cache, recipe, jobs=1, target="kaggle")
        refused = (
            "files, and a dataset has at most 50" if shards == TARGET_SHARDS + 1 else "and a published cache at most"
        )
        with pytest.raises(PublishError, match=refused):
            make_bundle(cache, METADATA)  # it has two versions, or three
    build_cache(source, tmp_path / "one", Recipe(size=8, variants=TARGET_SHARDS), jobs=1)
    made = make_bundle(tmp_path / "one", METADATA)
    assert len(made.files) == MAX_FILES
    assert broken_rules(made.folder) == verify_cache(made.folder) == []
    with pytest.raises(PublishError, match="leave --hashes out"):
        make_bundle(tmp_path / "one", METADATA, hashes=True)


def test_the_documented_limit_is_the_one_that_is_kept(capsys):
    for name in ("README.md", "docs/kaggle.md", "docs/warmup.md"):
        assert f"{TARGET_SHARDS} shards" in (ROOT / name).read_text().replace("\n", " ")
    with pytest.raises(SystemExit):
        main(["warmup", "--help-all"])
    assert f"{TARGET_SHARDS} shards" in " ".join(capsys.readouterr().out.split())
