"""New versions of a cache at Kaggle, against the stand-in: add-ons that hold what is new, and caches joined of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scripts.kaggle_server import KaggleServer
from tpucache import CachedDataset, NotACacheError, Recipe, StoreError, build_cache
from tpucache.cli import main
from tpucache.loading.find import find_version
from tpucache.store.manifest import Manifest
from tpucache.store.remote.kaggle import KaggleDataset
from tpucache.warmup import delete_samples

_RECIPE = Recipe(size=64, codec="raw")
_ID = "ann/birds-at-64"
_OPTIONS = ["--id", _ID, "--title", "Birds at 64", "--license", "CC-BY-4.0"]


def write_photos(folder: Path, numbers: range) -> None:
    for number in numbers:
        path = folder / "ab"[number % 2] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A cache, and the same one with three versions: more samples, and then some deleted."""
    folder = tmp_path_factory.mktemp("versions")
    write_photos(folder / "photos", range(200))
    build_cache(folder / "photos", folder / "first", _RECIPE, jobs=1)
    shutil.copytree(folder / "first", folder / "third")
    write_photos(folder / "photos", range(200, 202))
    build_cache(folder / "photos", folder / "third", _RECIPE, jobs=1)
    delete_samples(folder / "third", paths=["a/000.png", "b/001.png"])
    assert Manifest.load(folder / "third").number == 3
    return folder / "first", folder / "third"


def put(kaggle: KaggleServer, dataset_id: str, cache: Path) -> None:
    """Have a dataset with the files of a cache."""
    data = KaggleDataset(dataset_id)
    tokens = []
    for path in cache.iterdir():
        blob = data.start(path.name, path.stat().st_size, 1)
        kaggle.blobs[blob.token].data[:] = path.read_bytes()
        tokens.append(blob.token)
    data.create(dataset_id.partition("/")[2], "", tokens)
    data.close()


def mount(kaggle: KaggleServer, folder: Path) -> Path:
    """Write the newest versions of all datasets as Kaggle mounts them."""
    for dataset_id in kaggle.datasets:
        place = folder / "datasets" / dataset_id
        place.mkdir(parents=True)
        for name, data in kaggle.files(dataset_id).items():
            (place / name).write_bytes(data)
    return folder


def records(cache: Path) -> list[tuple[bytes, int]]:
    return [(image.numpy().tobytes(), int(label)) for image, label in CachedDataset(cache)]


def test_an_add_on_has_what_is_new_and_joins_with_what_is_there(
    versions: tuple[Path, Path], kaggle: KaggleServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    first, third = versions
    put(kaggle, _ID, first)
    kaggle.received, kaggle.faults.lag = 0, 1
    options = [*_OPTIONS, "--version-notes", "two more, two less", "--json"]
    assert main(["publish", str(third), *options, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert set(kaggle.datasets) == {_ID}
    assert kaggle.received == 0
    assert main(["publish", str(third), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {**planned, "uploaded": True}
    addition = kaggle.files(f"{_ID}-v3")
    assert report["files"] == {name: len(data) for name, data in addition.items()}
    assert report["bytes"] == kaggle.received == sum(map(len, addition.values()))
    assert not any(name in addition for name in kaggle.files(_ID) if name != "manifest.json")
    assert report["attach"] == [_ID]
    pictures = sum(len(data) for name, data in addition.items() if name.endswith(".lmdb"))
    whole = sum(len(data) for name, data in kaggle.files(_ID).items() if name.endswith(".lmdb"))
    assert pictures <= 0.015 * whole + 8192
    card = addition["README.md"].decode()
    assert "two more, two less" in card
    assert "This is an add-on" in card
    assert f'CachedDataset("kaggle:{_ID}@3"' in card
    assert "+2 samples" in card
    assert "-2 samples" in card
    monkeypatch.setenv("TPUCACHE_PATH", str(mount(kaggle, tmp_path / "input")))
    for name in (f"kaggle:{_ID}@3", "kaggle:birds-at-64@3"):
        assert records(name) == records(third)
    assert CachedDataset(f"kaggle:{_ID}@3").manifest.identity == Manifest.load(third).identity
    assert records(f"kaggle:{_ID}@1") == records(f"kaggle:{_ID}") == records(first)
    assert records(f"kaggle:{_ID}@2") == records(Path(f"{third}@2"))
    assert main(["verify", f"kaggle:{_ID}@3"]) == 0
    kaggle.received = 0
    assert main(["publish", str(third), *options]) == 0  # it is there
    assert kaggle.received == 0
    assert not [*third.parent.glob("*.json")]


def test_parents_that_are_missing_swapped_or_damaged_are_refused_by_name(
    versions: tuple[Path, Path], kaggle: KaggleServer, tmp_path: Path
) -> None:
    first, third = versions
    put(kaggle, _ID, first)
    assert main(["publish", str(third), *_OPTIONS, "--version-notes", "more"]) == 0
    place = mount(kaggle, tmp_path / "input")
    base = place / "datasets" / _ID
    shard = next(path.name for path in base.glob("*.lmdb"))
    aside = base.rename(tmp_path / "aside")
    with pytest.raises(NotACacheError, match=rf"@3 is not whole here: .*{shard}.* Attach {_ID}$"):
        find_version(f"kaggle:{_ID}", 3, [place])
    with pytest.raises(NotACacheError, match=rf"@4 is not mounted: there is version 3 in .*Attach .*{_ID}-v4"):
        find_version(f"kaggle:{_ID}", 4, [place])
    write_photos(tmp_path / "others", range(200))
    build_cache(tmp_path / "others", base, Recipe(size=64, codec="raw", fit="pad"), jobs=1)
    with pytest.raises(NotACacheError, match=rf"{base} has a manifest that is no version of this cache"):
        find_version(f"kaggle:{_ID}", 3, [place])
    shutil.rmtree(base)
    aside.rename(base)
    shutil.rmtree(tmp_path / "kept", ignore_errors=True)
    (tmp_path / "kept").write_text("no folder")
    with pytest.raises(StoreError, match=r"cannot be joined: .*Set TPUCACHE_DIR"):
        find_version(f"kaggle:{_ID}", 3, [place])
    (tmp_path / "kept").unlink()
    find_version(f"kaggle:{_ID}", 3, [place])
    (base / shard).write_bytes(b"short")
    with pytest.raises(NotACacheError, match=rf"{shard}.* or have another size"):
        find_version(f"kaggle:{_ID}", 3, [place])
    (base / "manifest.json").write_text("{}")
    with pytest.raises(NotACacheError, match=r"manifest.json.*Attach"):
        find_version(f"kaggle:{_ID}", 3, [place])


@pytest.mark.thorough
def test_a_cache_that_shares_nothing_is_a_version_of_the_same_dataset(
    versions: tuple[Path, Path], kaggle: KaggleServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    first, third = versions
    monkeypatch.setenv("PATH", "")
    assert main(["publish", str(third), *_OPTIONS, "--version-notes", "x"]) == 1
    assert f"{_ID} is not a dataset with a cache: publish the cache without" in capsys.readouterr().err
    write_photos(tmp_path / "others", range(4))
    build_cache(tmp_path / "others", tmp_path / "other", _RECIPE, jobs=1)
    put(kaggle, _ID, first)
    options = ["--version-notes", "all anew", "--out", str(tmp_path / "out")]
    assert main(["publish", str(tmp_path / "other"), *_OPTIONS, *options]) == 0
    out = capsys.readouterr().out
    assert "an add-on would send no less: a whole version is published" in out


def test_an_add_on_that_is_stopped_is_continued_and_sends_nothing_twice(
    versions: tuple[Path, Path], kaggle: KaggleServer
) -> None:
    first, third = versions
    put(kaggle, _ID, first)
    kaggle.received, kaggle.faults.quota = 0, 1
    options = ["publish", str(third), *_OPTIONS, "--version-notes", "more"]
    assert main(options) == 1  # Kaggle makes no version of the files
    before, kaggle.faults.quota = kaggle.received, None
    assert before
    del kaggle.datasets[f"{_ID}-v3"]
    assert main(options) == 0
    assert kaggle.received == before
    assert len(kaggle.datasets[f"{_ID}-v3"].versions) == 1
