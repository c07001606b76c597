"""Staging, publishing, fetching and pushing: what would overwrite something, or is not there, is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import COUNT, Lab, check_photos, class_of, files_of, flip, rotated_class_of
from refusals import assert_refused, refuses, succeeded

from tpucache import CachedDataset, TpucacheError, UsageError, find_cache, stage_cache

PUBLISH = ("--id", "ann/misuse-check", "--title", "Misuse check", "--license", "CC0-1.0", "--dry-run")


def mine(lab: Lab, name: str) -> Path:
    (lab.folder / "mine").mkdir()
    (lab.folder / "mine" / name).write_text("months of work")
    return lab.folder / "mine"


def own(lab: Lab) -> Path:
    cache = lab.copy(lab.shared.cache)
    (lab.folder / "link").symlink_to(cache)
    return cache


def publish(target: Callable[[Lab, Path], object]) -> Callable[[Lab, Path], tuple[object, ...]]:
    return lambda lab, place: ("publish", lab.shared.cache, "--out", target(lab, place), *PUBLISH)


#: What lies at a place, and a command that would write there; the place stays as it is.
OVERWRITING: dict[str, tuple[Callable[[Lab], Path], Callable[[Lab, Path], tuple[object, ...]]]] = {
    "publish over another cache": (lambda lab: lab.copy(lab.shared.relabelled), publish(lambda lab, place: place)),
    "publish into the cache": (own, lambda lab, place: ("publish", place, "--out", place, *PUBLISH)),
    "publish by a link": (own, lambda lab, place: ("publish", place, "--out", lab.folder / "link", *PUBLISH)),
    "publish below the cache": (own, lambda lab, place: ("publish", place, "--out", place / "publish", *PUBLISH)),
    "publish over a README": (lambda lab: mine(lab, "README.md"), publish(lambda lab, place: place)),
    "push onto itself": (own, lambda lab, place: ("push", place, place)),
    "push onto itself by a link": (own, lambda lab, place: ("push", place, lab.folder / "link")),
    "push onto its URL": (own, lambda lab, place: ("push", place, f"file://{lab.folder}/link/")),
    "push onto another cache": (
        lambda lab: lab.copy(lab.shared.relabelled),
        lambda lab, place: ("push", lab.shared.cache, f"file://{place}"),
    ),
    "fetch over a file": (
        lambda lab: mine(lab, "index.npy"),
        lambda lab, place: ("fetch", lab.shared.cache, place),
    ),
    "fetch into another cache": (
        lambda lab: lab.copy(lab.shared.relabelled),
        lambda lab, place: ("fetch", lab.shared.cache, place),
    ),
}


@pytest.mark.parametrize("case", OVERWRITING)
def test_nothing_is_overwritten(lab, case):
    make, words = OVERWRITING[case]
    place = make(lab)
    before = files_of(place)
    assert_refused(lab.command(*words(lab, place)), "copy|link|mine|publish", status=2)
    assert files_of(place) == before


def test_staging_overwrites_nothing(lab):
    places = [stage_cache(cache, lab.folder / "fast") for cache in (lab.shared.cache, lab.shared.relabelled)]
    for dataset, classes in zip(map(CachedDataset, places), (class_of, rotated_class_of), strict=True):
        check_photos(dataset, classes, range(COUNT))
    shutil.copy(lab.shared.relabelled / "manifest.json", places[0] / "manifest.json")
    shutil.rmtree(places[1])
    places[1].mkdir()
    (places[1] / "thesis.txt").write_text("only copy")
    cache = own(lab)
    flip(cache / "v00-00000.lmdb")
    for source, place, *words in (
        (lab.shared.cache, "fast", "holds another cache"),
        (lab.shared.relabelled, "fast", "thesis.txt|something else|holds"),
        (cache, "copy", "is inside the cache"),
        (cache, "slow", "v00-00000.lmdb", "verify"),
    ):
        with refuses(TpucacheError, *words):
            stage_cache(source, lab.folder / place)
    assert (places[1] / "thesis.txt").read_text() == "only copy"


def test_what_is_not_there_or_not_allowed(lab):
    cache = lab.copy(lab.shared.cache)
    flip(cache / "samples.npz")
    new = lab.folder / "new"
    for status, words, *said in (
        (1, ("fetch", cache, new), "samples.npz"),
        (1, ("fetch", f"file://{lab.folder}/nowhere", new), "nowhere"),
        (2, ("fetch", "nosuch://bucket/x", new), "nosuch"),
    ):
        assert_refused(lab.command(*words), *said, status=status)
        with refuses(TpucacheError):
            CachedDataset(new)


def test_what_was_pushed_is_fetched_back(lab):
    for there in (lab.folder / "a b#c?d%20", f"file://{lab.folder}/url"):
        succeeded(lab.command("push", lab.shared.cache, there))
        succeeded(lab.command("fetch", there, lab.folder / "back"))
        assert files_of(lab.folder / "back") == files_of(lab.shared.cache)


def test_two_caches_of_one_name_where_it_is_looked_for(lab):
    for owner, cache in (("ann", lab.shared.cache), ("bob", lab.shared.relabelled)):
        shutil.copytree(cache, lab.folder / owner / "birds")
    with refuses(UsageError, "ann", "bob", "path"):
        find_cache("kaggle:birds", [lab.folder])
    check_photos(CachedDataset(find_cache("kaggle:bob/birds", [lab.folder])), rotated_class_of, range(COUNT))
    with refuses(TpucacheError, "cats", "birds"):
        find_cache("kaggle:cats", [str(lab.folder)])
