"""A cache is found by its name wherever notebooks mount it; several or none are explained."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from signed import signed

from tpucache import CachedDataset, NotACacheError, UsageError, find_cache
from tpucache.cli import main
from tpucache.loading import find
from tpucache.warmup import delete_samples

SLUG = "digits-at-32"


def mount(cache: Path, place: Path) -> Path:
    """Put what makes a folder a cache there: all files, as links."""
    place.mkdir(parents=True)
    for path in cache.iterdir():
        (place / path.name).symlink_to(path)
    return place


@pytest.fixture
def other(cache: Path, tmp_path: Path) -> Path:
    """Another cache: its manifest differs."""
    place = tmp_path / "other"
    shutil.copytree(cache, place)
    manifest = place / "manifest.json"
    manifest.write_text(signed(manifest.read_text().replace('"ant"', '"asp"')))
    return place


@pytest.mark.parametrize(
    "layout",
    [
        SLUG,
        f"datasets/ann/{SLUG}",
        f"datasets/ann/{SLUG}/versions/3",
        f"datasets/ann/{SLUG}/cache",
        f"a/b/c/d/e/f/{SLUG}",
    ],
)
@pytest.mark.parametrize("name", [SLUG, f"kaggle:{SLUG}"])
def test_a_cache_is_found_in_every_layout(cache, tmp_path, layout, name):
    place = mount(cache, tmp_path / "input" / layout)
    (tmp_path / "input" / "train").mkdir()
    assert find_cache(name, [tmp_path / "nowhere", tmp_path / "input"]) == place


def test_the_owner_decides_between_datasets_of_one_slug(cache, other, tmp_path):
    place = mount(cache, tmp_path / "input" / "datasets" / "ann" / SLUG)
    mount(other, tmp_path / "input" / "datasets" / "bob" / SLUG)
    assert find_cache(f"kaggle:ann/{SLUG}", [tmp_path / "input"]) == place
    assert find_cache(f"ann/{SLUG}", [tmp_path / "input"]) == place
    with pytest.raises(UsageError, match=f"2 caches are called 'kaggle:{SLUG}': .*ann.*bob"):
        find_cache(f"kaggle:{SLUG}", [tmp_path / "input"])


def test_mounts_that_do_not_tell_the_owner_serve_any(cache, tmp_path):
    place = mount(cache, tmp_path / "input" / SLUG)
    assert find_cache(f"kaggle:ann/{SLUG}", [tmp_path / "input"]) == place


def test_the_name_of_another_owner_is_not_enough(cache, tmp_path):
    mount(cache, tmp_path / "input" / "datasets" / "bob" / SLUG)
    with pytest.raises(NotACacheError, match=f"manifests are in .*bob/{SLUG}"):
        find_cache(f"kaggle:ann/{SLUG}", [tmp_path / "input"])


def test_of_kagglehubs_versions_the_latest_is_taken(cache, other, tmp_path):
    versions = tmp_path / "datasets" / "ann" / SLUG / "versions"
    mount(other, versions / "9")
    place = mount(cache, versions / "10")
    assert find_cache(f"kaggle:{SLUG}", [tmp_path]) == place


def test_copies_of_one_cache_count_once_and_the_first_is_taken(cache, tmp_path):
    first = mount(cache, tmp_path / "a" / SLUG)
    mount(cache, tmp_path / "b" / SLUG)
    (tmp_path / "a" / "link").symlink_to(first)
    assert find_cache(SLUG, [tmp_path / "a", tmp_path / "b", tmp_path / "a"]) == first


def test_two_caches_of_one_name_are_refused_with_both_paths(cache, other, tmp_path):
    places = [mount(cache, tmp_path / "a" / SLUG), mount(other, tmp_path / "b" / SLUG)]
    for roots in ([tmp_path], [tmp_path / "a", tmp_path / "b"], [tmp_path / "b", tmp_path / "a"]):
        with pytest.raises(UsageError) as error:
            find_cache(SLUG, roots)
        assert all(str(place) in str(error.value) for place in places)


def test_a_cache_of_the_name_that_cannot_be_used_is_reported(cache, tmp_path, caplog):
    place = mount(cache, tmp_path / "a" / SLUG)
    broken = tmp_path / "b" / SLUG
    broken.mkdir(parents=True)
    (broken / "manifest.json").write_text(place.joinpath("manifest.json").read_text()[:-9])
    assert find_cache(SLUG, [tmp_path / "b", tmp_path / "a"]) == place
    assert f"cannot be used: {broken}" in caplog.text


def test_a_folder_that_is_not_a_cache_is_an_error(tmp_path):
    (tmp_path / SLUG).mkdir()
    (tmp_path / SLUG / "manifest.json").write_text("{}")
    with pytest.raises(NotACacheError, match="this is not a tpucache manifest"):
        find_cache(SLUG, [tmp_path])


def test_none_at_all_is_explained(tmp_path):
    with pytest.raises(NotACacheError) as caught:
        find_cache("kaggle:nothing-here", [tmp_path, tmp_path / "gone"])
    for part in ("kaggle:nothing-here", str(tmp_path), "gone (not there)", "TPUCACHE_PATH", "Add the dataset"):
        assert part in str(caught.value)


def test_large_trees_are_not_walked_to_their_end(cache, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(find, "_MAX_FOLDERS", 5)
    monkeypatch.setattr(find, "_MAX_ENTRIES", 8)
    for number in range(20):
        (tmp_path / "large" / f"{number:02d}").mkdir(parents=True)
    place = mount(cache, tmp_path / "small" / SLUG)
    roots = [tmp_path / "large", tmp_path / "small"]
    assert find_cache(SLUG, roots) == place
    assert "large was not searched to its end: it may hold another cache" in caplog.text
    with pytest.raises(NotACacheError, match=r"large: the search there ended after 5 folders"):
        find_cache("gone", roots)
    monkeypatch.setattr(find, "_MAX_SECONDS", -1)
    with pytest.raises(NotACacheError, match=r"small: the search there ended"):
        find_cache(SLUG, roots)
    assert len(find._folders(tmp_path / "large")) == 8


def test_depth_is_bounded(cache, tmp_path):
    mount(cache, tmp_path.joinpath(*"abcdefgh") / SLUG)
    with pytest.raises(NotACacheError):
        find_cache(SLUG, [tmp_path])


def test_hidden_folders_and_loops_of_links_are_passed_over(cache, tmp_path, caplog):
    mount(cache, tmp_path / ".hidden" / SLUG)
    place = mount(cache, tmp_path / "b/c/d/e/f/g" / SLUG)
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{}")
    assert [found.path for found in find.Search([tmp_path], 60).caches()] == [tmp_path / "broken", place]
    assert find_cache(SLUG, [tmp_path]) == place
    assert not caplog.text  # a manifest that is broken matters only in a folder of the name


def test_a_name_may_be_of_several_folders(cache, tmp_path):
    place = mount(cache, tmp_path / "a" / "b" / "c" / SLUG)
    assert find_cache(f"b/c/{SLUG}", [tmp_path]) == place


@pytest.mark.parametrize("name", ["", "kaggle:", "a//b", "../a", "/a", "kaggle:a/b/c", "kaggle:a/", "."])
def test_what_is_no_name_is_refused(name, tmp_path):
    with pytest.raises(UsageError, match="looked for as"):
        find_cache(name, [tmp_path])


@pytest.mark.slow
def test_the_environment_says_where_to_look(cache, tmp_path, monkeypatch, capsys):
    place = mount(cache, tmp_path / "input" / SLUG)
    monkeypatch.setenv("TPUCACHE_PATH", os.pathsep.join([str(tmp_path / "gone"), str(tmp_path / "input")]))
    assert find_cache(SLUG) == place
    assert CachedDataset(f"kaggle:{SLUG}", 1).directory == place
    assert main(["inspect", f"kaggle:ann/{SLUG}"]) == 0
    assert "4 classes: ant 38" in capsys.readouterr().out
    assert main(["inspect", "kaggle:gone"]) == 1
    assert "no cache is called 'kaggle:gone'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["inspect", "kaggle:a/b/c"])
    assert stop.value.code == 2
    assert "looked for as" in capsys.readouterr().err


def test_a_name_with_a_number_is_that_version_of_the_cache(cache, tmp_path, monkeypatch):
    place = shutil.copytree(cache, tmp_path / "input" / SLUG)
    delete_samples(place, paths=[CachedDataset(cache).paths[0]])
    monkeypatch.setenv("TPUCACHE_PATH", str(tmp_path / "input"))
    assert [len(CachedDataset(f"kaggle:{SLUG}{end}")) for end in ("", "@2", "@1")] == [149, 149, 150]
    with pytest.raises(UsageError, match="versions 1 to 2, and no version 3"):
        CachedDataset(f"kaggle:{SLUG}@3")


def test_the_usual_roots_are_those_of_kaggle_kagglehub_and_colab(tmp_path, monkeypatch):
    monkeypatch.delenv("TPUCACHE_PATH", raising=False)
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path))
    assert {Path("/kaggle/input"), tmp_path, Path("/content")} <= set(find.usual_roots())
