"""Staging, publishing, fetching and pushing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from scripts.checks.misuse.lab import COUNT, Lab, check_photos, class_of, files_of, rotated_class_of
from scripts.checks.misuse.outcome import Outcome, correct, equal, refused, refuses, succeeded, true
from scripts.checks.misuse.rows import row
from tpucache import CachedDataset, DamageError, TpucacheError, UsageError, find_cache, stage_cache

PUBLISH = ("--id", "ann/misuse-check", "--title", "Misuse check", "--license", "CC0-1.0", "--dry-run")
SECRET = "hunter2-secret"


@row
def two_caches_of_the_same_photographs_staged_to_one_place(lab: Lab) -> Outcome:
    place = lab.folder / "fast"
    staged = [stage_cache(cache, place) for cache in (lab.shared.cache(), lab.shared.relabelled())]
    for _ in range(2):
        check_photos(CachedDataset(staged[0]), class_of, range(COUNT))
        evidence = check_photos(CachedDataset(staged[1]), rotated_class_of, range(COUNT))
        staged = [stage_cache(str(cache), str(place)) for cache in (lab.shared.cache(), lab.shared.relabelled())]
    return correct(f"each copy has its own cache's labels; {evidence}")


@row
def a_staged_copy_that_was_altered(lab: Lab) -> Outcome:
    staged = stage_cache(lab.shared.cache(), lab.folder)
    for name in ("samples.npz", "index.npy", "v00-00000.lmdb"):
        data = bytearray((staged / name).read_bytes())
        data[len(data) // 2] ^= 4
        (staged / name).write_bytes(data)
    shutil.copy(lab.shared.relabelled() / "manifest.json", staged / "manifest.json")
    try:
        again = stage_cache(lab.shared.cache(), lab.folder)
    except UsageError as error:
        message = str(error)
        return refuses(lambda: stage_cache(lab.shared.cache(), lab.folder), UsageError, message[:5])
    equal("files", files_of(again), files_of(lab.shared.cache()))
    return correct("staging again makes it whole, to the byte")


@row
def staging_a_cache_into_itself(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.cache())
    before = files_of(cache)
    try:
        staged = stage_cache(cache, cache)
    except UsageError as error:
        message = str(error)
        equal("files", files_of(cache), before)
        return refuses(lambda: stage_cache(cache, cache), UsageError, message[:5])
    check_photos(CachedDataset(staged), class_of, range(COUNT))
    return correct(check_photos(CachedDataset(cache), class_of, range(COUNT)))


@row
def staging_where_something_else_has_the_folders_name(lab: Lab) -> Outcome:
    staged = stage_cache(lab.shared.cache(), lab.folder)
    shutil.rmtree(staged)
    staged.mkdir()
    (staged / "thesis.txt").write_text("only copy")
    outcome = refuses(
        lambda: stage_cache(lab.shared.cache(), lab.folder), UsageError, "thesis.txt|something else|holds"
    )
    equal("what was there", (staged / "thesis.txt").read_text(), "only copy")
    return outcome


@row
def staging_a_damaged_cache(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.cache())
    flip(cache / "v00-00000.lmdb")
    return refuses(lambda: stage_cache(cache, lab.folder / "fast"), DamageError, "v00-00000.lmdb", "verify")


@row
def publishing_over_a_finished_cache(lab: Lab) -> Outcome:
    other = lab.copy(lab.shared.relabelled())
    before = files_of(other)
    outcome = refused(lab.command("publish", lab.shared.cache(), "--out", other, *PUBLISH), "copy", status=2)
    equal("the other cache", files_of(other), before)
    return outcome


@row
def publishing_into_the_cache_itself(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.cache())
    link = lab.folder / "link"
    link.symlink_to(cache)
    before = files_of(cache)
    for out in (cache, link, cache / "publish"):
        outcome = refused(lab.command("publish", cache, "--out", out, *PUBLISH), "copy|link|publish", status=2)
        equal("the cache", files_of(cache), before)
    return outcome


@row
def publishing_where_a_README_of_ones_own_lies(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.cache())
    default = lab.folder / "copy.publish"
    default.mkdir()
    (default / "README.md").write_text("mine")
    outcome = refused(lab.command("publish", cache, *PUBLISH), "README.md|copy.publish", status=2)
    equal("the file", (default / "README.md").read_text(), "mine")
    return outcome


@row
def publishing_twice_and_then_another_cache(lab: Lab) -> Outcome:
    out = lab.folder / "out"
    for _ in range(2):
        succeeded(lab.command("publish", lab.shared.cache(), "--out", out, *PUBLISH))
    check_photos(CachedDataset(out), class_of, range(COUNT))
    before = files_of(out)
    done = lab.command("publish", lab.shared.relabelled(), "--out", out, *PUBLISH)
    if done.status:
        equal("the first cache's folder", files_of(out), before)
        return refused(done, "out", status=done.status)
    return correct(
        "the folder is the second cache's: " + check_photos(CachedDataset(out), rotated_class_of, range(COUNT))
    )


@row
def publishing_under_a_name_that_Kaggle_refuses(lab: Lab) -> Outcome:
    for words in (("--id", "no-owner"), ("--title", "short"), ("--license", "do what you like"), ("--id", "a/../b")):
        done = lab.command("publish", lab.shared.cache(), "--out", lab.folder / "out", *PUBLISH, *words)
        outcome = refused(done, words[0].strip("-"), status=done.status if done.status in (1, 2) else 1)
        true("nothing was written", not (lab.folder / "out").exists())
    return outcome


@row
def pushing_a_cache_onto_itself(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.cache())
    (lab.folder / "link").symlink_to(cache)
    before = files_of(cache)
    for target in (cache, lab.folder / "link", f"file://{cache}", f"file://{lab.folder}/link/", f"{cache}/../copy"):
        outcome = refused(lab.command("push", cache, target), "copy|link", status=2)
        equal(f"the cache after {target}", files_of(cache), before)
    return outcome


@row
def pushing_onto_another_cache(lab: Lab) -> Outcome:
    other = lab.copy(lab.shared.relabelled())
    before = files_of(other)
    outcome = refused(lab.command("push", lab.shared.cache(), f"file://{other}"), "copy", status=2)
    equal("the other cache", files_of(other), before)
    return outcome


@row
def pushing_and_fetching_back(lab: Lab) -> Outcome:
    there, back = lab.folder / "a b#c?d%20", lab.folder / "back"
    succeeded(lab.command("push", lab.shared.cache(), there))
    succeeded(lab.command("fetch", there, back))
    equal("files", files_of(back), files_of(lab.shared.cache()))
    succeeded(lab.command("push", lab.shared.cache(), f"file://{lab.folder}/url"))
    succeeded(lab.command("fetch", f"file://{lab.folder}/url", lab.folder / "second"))
    equal("files", files_of(lab.folder / "second"), files_of(lab.shared.cache()))
    return correct("the same files to the byte, by folder names with spaces and signs and by file://")


@row
def fetching_over_a_file_of_ones_own(lab: Lab) -> Outcome:
    mine = lab.folder / "mine"
    mine.mkdir()
    (mine / "index.npy").write_bytes(b"months of work")
    outcome = refused(lab.command("fetch", lab.shared.cache(), mine), "mine", status=2)
    equal("the file", (mine / "index.npy").read_bytes(), b"months of work")
    return outcome


@row
def fetching_into_another_cache(lab: Lab) -> Outcome:
    other = lab.copy(lab.shared.relabelled())
    before = files_of(other)
    outcome = refused(lab.command("fetch", lab.shared.cache(), other), "copy", status=2)
    equal("the other cache", files_of(other), before)
    return outcome


@row
def fetching_what_is_damaged_where_it_comes_from(lab: Lab) -> Outcome:
    cache = lab.copy(lab.shared.cache())
    flip(cache / "samples.npz")
    outcome = refused(lab.command("fetch", cache, lab.folder / "new"), "samples.npz")
    refuses(lambda: CachedDataset(lab.folder / "new"), TpucacheError)
    return outcome


@row
def fetching_from_nowhere(lab: Lab) -> Outcome:
    for url in (lab.folder / "nowhere", f"file://{lab.folder}/nowhere", "nosuch://bucket/x"):
        done = lab.command("fetch", url, lab.folder / "new")
        outcome = refused(done, "nowhere|nosuch", status=done.status if done.status in (1, 2) else 1)
        true("no folder is left", not (lab.folder / "new").exists() or not any((lab.folder / "new").iterdir()))
    return outcome


@row
def a_password_in_a_URL_that_cannot_be_opened(lab: Lab) -> Outcome:
    urls = (
        f"http://ann:{SECRET}@127.0.0.1:9/c",
        f"https://127.0.0.1:9/c?token={SECRET}",
        f"ftp://ann:{SECRET}@127.0.0.1:9/c",
    )
    for url in urls:
        for words in (
            ["fetch", url, lab.folder / "new"],
            ["push", lab.shared.cache(), url, "--json"],
            ["inspect", url],
        ):
            done = lab.command(*words)
            outcome = refused(done, status=done.status if done.status in (1, 2) else 1)
            true("no password in what is printed", SECRET not in done.out + done.err)
    return outcome


@row
def two_caches_of_one_name_where_it_is_looked_for(lab: Lab) -> Outcome:
    for owner, cache in (("ann", lab.shared.cache()), ("bob", lab.shared.relabelled())):
        shutil.copytree(cache, lab.folder / owner / "birds")
    refuses(lambda: find_cache("kaggle:birds", [lab.folder]), UsageError, "ann", "bob", "path")
    check_photos(CachedDataset(find_cache("kaggle:bob/birds", [lab.folder])), rotated_class_of, range(COUNT))
    return refuses(lambda: find_cache("kaggle:cats", [str(lab.folder)]), TpucacheError, "cats", "birds")


@row
def the_report_of_a_transfer_as_JSON(lab: Lab) -> Outcome:
    done = succeeded(lab.command("push", lab.shared.cache(), lab.folder / "there", "--json"))
    report = json.loads(done.out)
    sizes = sum(path.stat().st_size for path in lab.shared.cache().iterdir())
    true(f"the report is an object: {report}", isinstance(report, dict))
    equal("bytes there", sum(path.stat().st_size for path in (lab.folder / "there").iterdir()), sizes)
    return correct(f"one JSON object with {', '.join(report)}; as many bytes there as here")


def flip(path: Path, share: float = 0.5) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 1
    path.write_bytes(data)
