"""A claim says whose a folder is: what may be written to is empty or certainly the command's own."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from tpucache import Manifest, UsageError
from tpucache.store.copying import CLAIM_NAME, Claim, check_ours, claim_folder, read_claims, remove_claim


def claim_of(**files):
    """A claim of files with short stand-ins for digests: `v00` is a shard, any other name a table."""
    names = {name: f"{name}-00000.lmdb" if name.startswith("v") else f"{name}.npy" for name in files}
    return Claim("fetch", f"identity of {sorted(files.items())}", {names[name]: files[name] for name in files})


@pytest.mark.parametrize("name", ["index.npy", "v00-00000.lmdb", "README.md", "manifest.json", ".index.npy.part"])
def test_no_name_makes_a_folder_ours(name):
    with pytest.raises(UsageError, match=f"holds {name} and no cache that could be continued"):
        check_ours("there", [name], [], claim_of(v00="a"))


def test_an_unfinished_warmup_is_nobodys_place():
    claim = claim_of(v00="a")
    with pytest.raises(UsageError, match="unfinished warmup"):
        check_ours("there", [".warmup", "manifest.json"], [claim], claim)


def test_a_cache_may_only_take_the_place_of_its_own_versions():
    before = claim_of(v00="a", index="i")
    after = dataclasses.replace(claim_of(v00="a", table="k", v01="b"), parents=(before.identity,))
    assert before.precedes(before)
    assert before.precedes(after)
    assert not after.precedes(before)
    assert not before.precedes(dataclasses.replace(after, parents=()))


def test_a_file_that_no_claim_tells_of_is_not_overwritten():
    before = claim_of(v00="a")
    after = dataclasses.replace(claim_of(v00="a", v01="b"), parents=(before.identity,))
    check_ours("there", ["v00-00000.lmdb", "notes.txt"], [before], after)
    check_ours("there", ["v00-00000.lmdb", "v01-00000.lmdb"], [before, after], after)
    for name in ("v01-00000.lmdb", ".v01-00000.lmdb.part"):
        with pytest.raises(UsageError, match=f"do not belong to its cache and would be replaced .{name}"):
            check_ours("there", ["v00-00000.lmdb", name], [dataclasses.replace(before, command="finished")], after)


def test_a_claim_comes_back_from_its_folder_until_it_ends(cache, tmp_path):
    claim = Claim.of("fetch", Manifest.load(cache))
    claim_folder(tmp_path, claim)
    assert read_claims(tmp_path) == [claim]
    os.link(cache / "manifest.json", tmp_path / "manifest.json")
    assert [each.identity for each in read_claims(tmp_path)] == [claim.identity] * 2
    remove_claim(tmp_path)
    assert read_claims(tmp_path) == [dataclasses.replace(claim, command="finished")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "3",
        "[" * 5000,
        '{"identity": "x"}',
        json.dumps({"command": "fetch", "identity": "x", "files": {}}),
    ],
)
def test_a_file_that_no_tpucache_wrote_is_no_claim(tmp_path, text):
    (tmp_path / CLAIM_NAME).write_text(text)
    with pytest.raises(UsageError, match="is not a file that tpucache wrote"):
        read_claims(tmp_path)


@pytest.mark.parametrize("part", ["command", "identity", "files"])
def test_a_claim_of_other_types_is_no_claim(part):
    content = json.loads(claim_of(v00="a").to_json())
    assert Claim.from_json(json.dumps(content)) is not None
    for value in (None, 3, [1], {"a": 1}):
        assert Claim.from_json(json.dumps(content | {part: value})) is None


def test_a_claim_knows_what_its_own_files_are_called_while_they_are_written():
    claim = claim_of(v00="a", samples="b")
    for name in (CLAIM_NAME, "manifest.json", "samples.npy", "v00-00000.lmdb"):
        assert claim.wrote_aside(f".{name}.123.tmp")
    for name in (
        ".index.npy.123.tmp",
        ".v01-00000.lmdb.123.tmp",
        "samples.npy",
        ".samples.npy.tmp",
        "samples.npy.1.tmp",
    ):
        assert not claim.wrote_aside(name)
