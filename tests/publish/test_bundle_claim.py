"""The folder to upload is only made where nothing is, or where publish itself made it of the same cache."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from made import contents
from thorough import thorough

from tpucache import Manifest, Recipe, StoreError, UsageError, build_cache
from tpucache.cli import main
from tpucache.publish.bundle import make_bundle
from tpucache.publish.rules import Metadata
from tpucache.publish.transfer import fetch_cache
from tpucache.store.copying import CLAIM_NAME

pytestmark = pytest.mark.slow

METADATA = Metadata("ann/noise-at-16", "Noise at 16", "CC-BY-4.0")
WORDS = ["--id", "ann/noise-at-16", "--title", "Noise at 16", "--license", "CC0-1.0"]


@pytest.fixture
def other(photos, tmp_path):
    """Another finished cache, with files of the same names."""
    build_cache(photos / "ant", tmp_path / "other", Recipe(size=16, variants=1, seed=9), jobs=1)
    return tmp_path / "other"


@pytest.mark.parametrize("words", [[], *thorough(["--dry-run"])])
@pytest.mark.parametrize("place", ["--out", "the default"])
@pytest.mark.parametrize(
    "holds", ["cache", "README.md", *thorough("index.npy", "dataset-metadata.json", "tpucache-0.0.1.whl")]
)
def test_publish_deletes_nothing_of_someone_else(stored, other, tmp_path, monkeypatch, capsys, words, place, holds):
    monkeypatch.setenv("PATH", "/nowhere")
    folder = tmp_path / "mine" if place == "--out" else stored.with_name("stored.publish")
    if holds == "cache":
        shutil.copytree(other, folder)
    else:
        folder.mkdir()
        (folder / holds).write_text('{"title": "mine"}')
    before = contents(folder)
    out = ["--out", str(folder)] if place == "--out" else []
    assert main(["publish", str(stored), *WORDS, *words, *out]) == 2
    assert f"{folder} holds " in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize("way", ["", "sub/folder", "..", "link"])
def test_neither_the_cache_nor_what_is_in_or_around_it_is_a_place(stored, tmp_path, way):
    (tmp_path / "link").symlink_to(stored)
    before = contents(stored)
    out = tmp_path / "link" if way == "link" else stored / way
    with pytest.raises(UsageError, match=r"the cache itself|inside the cache|is inside"):
        make_bundle(str(stored), METADATA, str(out))
    assert contents(stored) == before
    assert {path.name for path in tmp_path.iterdir()} == {"link", "stored"}


def test_a_folder_that_was_made_of_another_cache_is_left_alone(stored, other, tmp_path):
    """It may be the only copy of that cache."""
    folder = make_bundle(other, METADATA, tmp_path / "out").folder
    shutil.rmtree(other)
    before = contents(folder)
    with pytest.raises(UsageError, match="made of another cache"):
        make_bundle(stored, METADATA, folder)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["README.md", "sheet.png", "manifest.json", "index.npy"])
def test_a_file_that_was_changed_since_is_not_overwritten(stored, name):
    folder = make_bundle(stored, METADATA).folder
    (folder / name).unlink()
    (folder / name).write_bytes(b"mine")
    with pytest.raises(UsageError, match=f"holds {name}, changed since"):
        make_bundle(stored, METADATA)
    assert (folder / name).read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["v05-00000.lmdb", "index-7.npy", ".thesis.7.tmp", "tpucache-9.9.9-py3-none-any.whl"])
def test_a_file_that_was_added_since_is_refused_and_not_removed(stored, name):
    folder = make_bundle(stored, METADATA).folder
    (folder / name).write_bytes(b"mine")
    with pytest.raises(UsageError, match=f"holds {name}, which publish did not write"):
        make_bundle(stored, METADATA)
    assert (folder / name).read_bytes() == b"mine"


def test_metadata_that_a_killed_publish_began_are_removed(stored):
    begun = make_bundle(stored, METADATA).folder / ".dataset-metadata.json.7.tmp"
    begun.touch()
    make_bundle(stored, METADATA)
    assert not begun.exists()


class Killed(BaseException):
    """What no handler catches."""


STEPS = range(0, 10, 3)


def stop_before(step, patch):
    """Have making a bundle stop before the step-th change of a file."""
    left = iter(range(step + 1))

    def counted(call):
        def count(*arguments, **named):
            if next(left, step) == step:
                raise Killed
            return call(*arguments, **named)

        return count

    for name in ("replace", "hardlink_to", "unlink"):
        patch.setattr(Path, name, counted(getattr(Path, name)))


@pytest.mark.parametrize("first", [3, *thorough(*(step for step in STEPS if step != 3))])
def test_publish_continues_wherever_it_was_stopped_twice(stored, monkeypatch, first):
    """The second time with other words on the card."""
    folder = stored.with_name("stored.publish")
    for second in STEPS[::2]:
        for step, title in ((first, "Noise at 16"), (second, "Noise at sixteen")):
            with monkeypatch.context() as patch:
                stop_before(step, patch)
                with pytest.raises(Killed):
                    make_bundle(stored, Metadata("ann/noise-at-16", title, "CC-BY-4.0"))
        made = make_bundle(stored, METADATA)
        assert (folder / "README.md").read_text().startswith("# Noise at 16")
        assert not (folder / CLAIM_NAME).exists()
        assert made.files.keys() == make_bundle(stored, METADATA).files.keys()
        if second:
            shutil.rmtree(folder)  # once, a finished folder is brought up to date


def test_a_partial_folder_of_another_cache_is_not_continued(stored, other, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_before(3, patch)
        with pytest.raises(Killed):
            make_bundle(other, METADATA, out)
    before = contents(out)
    with pytest.raises(UsageError, match="made of another cache"):
        make_bundle(stored, METADATA, out)
    assert contents(out) == before
    make_bundle(other, METADATA, out)


def test_a_folder_that_fetch_fills_is_not_to_be_uploaded(stored, tmp_path):
    out = tmp_path / "out"

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_cache(str(stored), out, stop)
    before = contents(out)
    with pytest.raises(UsageError, match="holds "):
        make_bundle(stored, METADATA, out)
    assert contents(out) == before


def test_two_publishes_from_one_folder_are_refused(stored, monkeypatch):
    link = Path.hardlink_to

    def publish_again(*arguments):
        with pytest.raises(StoreError, match="another process is publishing"):
            make_bundle(stored, METADATA)
        link(*arguments)

    monkeypatch.setattr(Path, "hardlink_to", publish_again)
    make_bundle(stored, METADATA)


def test_the_claim_stays_out_of_what_is_uploaded_and_out_of_the_cache(stored):
    made = make_bundle(stored, METADATA)
    assert CLAIM_NAME not in made.files
    assert json.loads((made.folder / "dataset-metadata.json").read_text())["tpucache"]["command"] == "publish"
    assert Manifest.load(made.folder) == Manifest.load(stored)


def test_a_moved_folder_is_still_known_as_one_of_ours(stored, tmp_path):
    moved = shutil.copytree(make_bundle(stored, METADATA).folder, tmp_path / "moved")
    os.utime(moved / "index.npy", (0, 0))
    assert make_bundle(stored, METADATA, moved).folder == moved
