"""Staging, publishing, fetching and pushing."""

from __future__ import annotations

import shutil

from lab import (
    COUNT,
    check_photos,
    class_of,
    files_of,
    rotated_class_of,
)
from refusals import assert_refused, refuses, succeeded

from tpucache import CachedDataset, UsageError, stage_cache

PUBLISH = ("--id", "ann/misuse-check", "--title", "Misuse check", "--license", "CC0-1.0", "--dry-run")
SECRET = "hunter2-secret"


def test_two_caches_of_the_same_photographs_staged_to_one_place(lab):
    place = lab.folder / "fast"
    staged = [stage_cache(cache, place) for cache in (lab.shared.cache, lab.shared.relabelled)]
    for _ in range(2):
        check_photos(CachedDataset(staged[0]), class_of, range(COUNT))
        check_photos(CachedDataset(staged[1]), rotated_class_of, range(COUNT))
        staged = [stage_cache(str(cache), str(place)) for cache in (lab.shared.cache, lab.shared.relabelled)]


def test_a_staged_copy_that_was_altered(lab):
    staged = stage_cache(lab.shared.cache, lab.folder)
    for name in ("samples.npz", "index.npy", "v00-00000.lmdb"):
        data = bytearray((staged / name).read_bytes())
        data[len(data) // 2] ^= 4
        (staged / name).write_bytes(data)
    shutil.copy(lab.shared.relabelled / "manifest.json", staged / "manifest.json")
    with refuses(UsageError, "holds another cache"):
        stage_cache(lab.shared.cache, lab.folder)


def test_staging_a_cache_into_itself(lab):
    cache = lab.copy(lab.shared.cache)
    before = files_of(cache)
    with refuses(UsageError, "is inside the cache"):
        stage_cache(cache, cache)
    assert files_of(cache) == before


def test_staging_where_something_else_has_the_folders_name(lab):
    staged = stage_cache(lab.shared.cache, lab.folder)
    shutil.rmtree(staged)
    staged.mkdir()
    (staged / "thesis.txt").write_text("only copy")
    with refuses(UsageError, "thesis.txt|something else|holds"):
        stage_cache(lab.shared.cache, lab.folder)
    assert (staged / "thesis.txt").read_text() == "only copy"


def test_publishing_over_a_finished_cache(lab):
    other = lab.copy(lab.shared.relabelled)
    before = files_of(other)
    assert_refused(lab.command("publish", lab.shared.cache, "--out", other, *PUBLISH), "copy", status=2)
    assert files_of(other) == before


def test_publishing_into_the_cache_itself(lab):
    cache = lab.copy(lab.shared.cache)
    link = lab.folder / "link"
    link.symlink_to(cache)
    before = files_of(cache)
    for out in (cache, link, cache / "publish"):
        assert_refused(lab.command("publish", cache, "--out", out, *PUBLISH), "copy|link|publish", status=2)
        assert files_of(cache) == before


def test_publishing_where_a_README_of_ones_own_lies(lab):
    cache = lab.copy(lab.shared.cache)
    default = lab.folder / "copy.publish"
    default.mkdir()
    (default / "README.md").write_text("mine")
    assert_refused(lab.command("publish", cache, *PUBLISH), "README.md|copy.publish", status=2)
    assert (default / "README.md").read_text() == "mine"


def test_publishing_twice_and_then_another_cache(lab):
    out = lab.folder / "out"
    for _ in range(2):
        succeeded(lab.command("publish", lab.shared.cache, "--out", out, *PUBLISH))
    check_photos(CachedDataset(out), class_of, range(COUNT))
    before = files_of(out)
    done = lab.command("publish", lab.shared.relabelled, "--out", out, *PUBLISH)
    assert files_of(out) == before
    assert_refused(done, "out", status=2)


def test_pushing_a_cache_onto_itself(lab):
    cache = lab.copy(lab.shared.cache)
    (lab.folder / "link").symlink_to(cache)
    before = files_of(cache)
    for target in (cache, lab.folder / "link", f"file://{cache}", f"file://{lab.folder}/link/", f"{cache}/../copy"):
        assert_refused(lab.command("push", cache, target), "copy|link", status=2)
        assert files_of(cache) == before, f"the cache after {target}"


def test_pushing_onto_another_cache(lab):
    other = lab.copy(lab.shared.relabelled)
    before = files_of(other)
    assert_refused(lab.command("push", lab.shared.cache, f"file://{other}"), "copy", status=2)
    assert files_of(other) == before


def test_fetching_over_a_file_of_ones_own(lab):
    mine = lab.folder / "mine"
    mine.mkdir()
    (mine / "index.npy").write_bytes(b"months of work")
    assert_refused(lab.command("fetch", lab.shared.cache, mine), "mine", status=2)
    assert (mine / "index.npy").read_bytes() == b"months of work"


def test_fetching_into_another_cache(lab):
    other = lab.copy(lab.shared.relabelled)
    before = files_of(other)
    assert_refused(lab.command("fetch", lab.shared.cache, other), "copy", status=2)
    assert files_of(other) == before


def test_fetching_from_nowhere(lab):
    for url in (lab.folder / "nowhere", f"file://{lab.folder}/nowhere", "nosuch://bucket/x"):
        done = lab.command("fetch", url, lab.folder / "new")
        assert_refused(done, "nowhere|nosuch", status=2 if "nosuch" in str(url) else 1)
        assert not (lab.folder / "new").exists() or not any((lab.folder / "new").iterdir())


def test_a_password_in_a_URL_that_cannot_be_opened(lab, monkeypatch):
    monkeypatch.setattr("tpucache.store.remote.retry._FIRST_PAUSE", 0.001)
    urls = (
        f"http://ann:{SECRET}@127.0.0.1:9/c",
        f"https://127.0.0.1:9/c?token={SECRET}",
        f"ftp://ann:{SECRET}@127.0.0.1:9/c",
    )
    for url in urls:
        for words in (
            ["fetch", url, lab.folder / "new"],
            ["push", lab.shared.cache, url, "--json"],
            ["inspect", url],
        ):
            done = lab.command(*words)
            assert done.status in (1, 2)  # by what the URL is refused for
            assert_refused(done, status=done.status)
            assert SECRET not in done.out + done.err
