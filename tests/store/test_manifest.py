"""The manifest comes back as it went, is saved whole or not at all, and is believed in nothing unseen."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import operator
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example as with_example
from hypothesis import given, settings
from hypothesis import strategies as st
from signed import signed
from thorough import examples, thorough

from tpucache.errors import DamageError, FormatError, NotACacheError
from tpucache.store import files
from tpucache.store import format as fmt
from tpucache.store.cache import cache_fingerprint
from tpucache.store.fields import DTYPES, Field
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry, Skipped, Statistics

Path_ = tuple[Any, ...]

QUICK = settings(max_examples=examples(60))
SHA = "0123456789abcdef" * 4
TABLE_NAMES = ("index.npy", "samples.npz")
ARABIC_NAME = "v\u0660\u0660-\u0660\u0660\u0660\u0660\u0660.lmdb"
FREE = ("recipe", "source", "created_by")


def shard(variant: int, block: int, first: int, records: int, sha256: str = SHA) -> ShardEntry:
    return ShardEntry(fmt.shard_name(variant, block), 8192, sha256, variant, block, first, records, sha256)


def example() -> Manifest:
    return Manifest(
        samples=5,
        variants=(0, 1),
        fields=(Field("image", "png", "|u1", (4, 6, 3)), Field("tokens", "bytes", "|u1", ())),
        classes=("ant", "bee"),
        shards=(shard(0, 0, 0, 3), shard(0, 1, 3, 2), shard(1, 0, 0, 3), shard(1, 1, 3, 2)),
        tables=(FileEntry("index.npy", 328, SHA), FileEntry("samples.npz", 900, SHA)),
        skipped=(Skipped(2, "a\udcff.png", "cut short"),),
        statistics=Statistics((1.5, 2.0, 255.0), (0.0, 1.0, 2.0), (3, 2)),
        fingerprint=SHA,
        recipe={"size": [4, 6], "seed": 0},
        source={"kind": "folder"},
        created_by={"python": "3"},
    )


def content() -> dict[str, Any]:
    return json.loads(example().to_json())


def leaves(node: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Yield the path and value of every JSON value inside what a reader interprets, containers too."""
    yield path, node
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if path or key not in FREE:
            yield from leaves(value, (*path, key))


def parent(whole: Any, path: Path_) -> Any:
    """Return the container of a JSON value."""
    return functools.reduce(operator.getitem, path[:-1], whole)


def replaced(path: Path_, value: Any) -> Any:
    """Return the example's JSON with another value at one path."""
    whole = content()
    parent(whole, path)[path[-1]] = value
    return whole


def refused(whole: Any, match: str | None = None) -> None:
    """Assert that a manifest of this JSON, or this text, is refused."""
    with pytest.raises(FormatError, match=match):
        Manifest.from_json(whole if isinstance(whole, str | bytes) else json.dumps(whole))


def label(path: Path_) -> str:
    return ".".join(map(str, path)) or "all"


INTEGERS = [path for path, value in leaves(content()) if isinstance(value, int)]
KEYS = [path for path, _ in leaves(content()) if path and isinstance(path[-1], str)] + [(key,) for key in FREE]

names = st.text(min_size=1, max_size=8)
shas = st.text("0123456789abcdef", min_size=64, max_size=64)
numbers = st.floats(-1e8, 1e8)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
free = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
shapes = st.lists(st.integers(0, 50), max_size=4).map(tuple)
field_names = st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True)
fields = st.one_of(
    st.builds(Field, field_names, st.sampled_from(["raw", "zstd"]), st.sampled_from(DTYPES), shapes),
    st.builds(Field, field_names, st.sampled_from(["png", "jpeg"]), st.just("|u1"), st.just((3, 5, 1))),
    st.builds(Field, field_names, st.just("bytes"), st.just("|u1"), st.just(())),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    blocks = draw(st.lists(st.integers(0, 1000), max_size=4))
    variants = draw(st.lists(st.integers(0, fmt.MAX_VARIANTS), min_size=1, max_size=3, unique=True).map(sorted))
    classes = draw(st.lists(names, max_size=3, unique=True))
    firsts = [sum(blocks[:at]) for at in range(len(blocks))]
    shards = [
        shard(variant, block, firsts[block], records, draw(shas))
        for variant in variants
        for block, records in enumerate(blocks)
    ]
    channels = draw(st.lists(st.tuples(numbers, numbers), max_size=3))
    return Manifest(
        samples=sum(blocks),
        variants=tuple(variants),
        fields=tuple(draw(st.lists(fields, min_size=1, max_size=3, unique_by=lambda field: field.name))),
        classes=tuple(classes),
        shards=tuple(draw(st.permutations(shards))),
        tables=tuple(FileEntry(name, draw(st.integers(0, 1 << 62)), draw(shas)) for name in TABLE_NAMES),
        skipped=tuple(draw(st.lists(st.builds(Skipped, st.integers(0, 99), st.text(max_size=9), names), max_size=2))),
        statistics=Statistics(
            tuple(mean for mean, _ in channels),
            tuple(std for _, std in channels),
            tuple(draw(st.sampled_from([[], [7] * len(classes)]))),
        ),
        fingerprint=draw(shas),
        recipe=draw(free),
        source=draw(free),
        created_by=draw(free),
    )


@pytest.mark.slow
@QUICK
@given(manifests())
def test_a_manifest_comes_back_as_it_went(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.text) == manifest
    assert Manifest.from_json(manifest.text.encode()) == manifest


def test_a_manifest_sums_what_it_lists() -> None:
    manifest = example()
    assert (manifest.records, manifest.augmented) == (10, 1)
    assert manifest.total_bytes == 4 * 8192 + 328 + 900
    assert manifest.layout.fields == manifest.fields


HOSTILE = [
    None, True, False, 0, -1, 1, 2, 1.0, 1.5, -0.0, 1e308, float("nan"), float("inf"), 2**31, 2**63, 2**64, 10**300,
    "", "0", "../x", "/etc/passwd", "..", "v00-00000.lmdb/../x", "v00-00000.lmdb\0", ARABIC_NAME,
    "v99-00000.lmdb", "index.npy", "|O", ">u2", "png", "\ud800", SHA.upper(), SHA[:-1], SHA + "\n", "x" * 5000,
    [], {}, [[]], [{}], [None], [True], [0], [1, 1], [-1], [float("nan")], ["a", "a"], [10**300] * 9,
    {"name": "x"}, {"": {}}, [[[[[]]]]], [0] * 5000,
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(data=st.data())
def test_hostile_mutations_raise_nothing_but_format_errors(data: st.DataObject) -> None:
    whole = content()
    for _ in range(data.draw(st.integers(1, 3))):
        path, _ = data.draw(st.sampled_from(list(leaves(whole))[1:]))
        node = parent(whole, path)
        change = data.draw(st.sampled_from(["replace", "delete", "double"]))
        if change == "replace":
            node[path[-1]] = copy.deepcopy(data.draw(st.one_of(st.sampled_from(HOSTILE), json_values)))
        elif change == "delete":
            del node[path[-1]]
        elif isinstance(node, list):
            node.append(copy.deepcopy(node[path[-1]]))
    try:
        manifest = Manifest.from_json(signed(json.dumps(whole)))
    except FormatError:
        return
    assert Manifest.from_json(manifest.text) == manifest
    for entry in (*manifest.shards, *manifest.tables):
        assert Path(entry.name).name == entry.name
        assert entry.name.isascii()


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(st.one_of(st.text(max_size=60), st.binary(max_size=60), json_values.map(json.dumps)))
@with_example("")
@with_example(b"\x80")
@with_example("{} {}")
@with_example('"tpucache"')
def test_text_that_is_no_manifest_is_refused(text: str | bytes) -> None:
    refused(text)


@pytest.mark.parametrize("path", INTEGERS, ids=label)
def test_only_whole_numbers_in_range_count_as_numbers(path: Path_) -> None:
    for value in (True, False, "1", None, -1, 0.5, float("nan"), 10**300, [1], {}):
        refused(replaced(path, value))
    for text in ("9" * 5000, "-" + "9" * 5000, "1" + "0" * 400, "1e999"):
        refused(json.dumps(replaced(path, "HERE")).replace('"HERE"', text))


@pytest.mark.parametrize("path", KEYS, ids=label)
def test_no_key_may_be_missing_or_null(path: Path_) -> None:
    refused(replaced(path, None))
    whole = content()
    del parent(whole, path)[path[-1]]
    refused(whole)


HUGE = [26_000, 26_000, 3]  # 2 GB
SHARDS: list[dict[str, Any]] = content()["shards"]
TABLES: list[dict[str, Any]] = content()["tables"]


def test_one_value_that_no_writer_gives_is_refused() -> None:
    shas = [SHA.upper(), SHA[:-1], SHA + "0", SHA + "\n", "g" * 64, ""]
    places = [("fingerprint",), ("shards", 1, "sha256"), ("shards", 1, "records_sha256"), ("tables", 0, "sha256")]
    names = [
        "../x", "/etc/passwd", "x/v00-00000.lmdb", "v00-00000.lmdb/", "v00-00000.lmdb\n", "V00-00000.lmdb", "", ".",
        "v01-00000.lmdb", "v00-00001.lmdb", "v000-00000.lmdb", "v00-000000.lmdb", "manifest.json", ARABIC_NAME,
    ]  # fmt: skip
    tables = ["../index.npy", "/index.npy", "manifest.json", "samples.npz", "v00-00000.lmdb", ""]
    versions = [0, 1, 9, 99, -1, "1", None, True, [1], {"a": 1}, 1.5]
    for reason, paths, values in (
        ("not a SHA-256", places, shas),
        (r"shards\[0\]", [("shards", 0, "name")], names),
        ("table", [("tables", 0, "name")], tables),
        ("versions 6 to 8: install the tpucache that wrote the cache, or", [("version",)], versions),
        ("3 channels have a mean, but 2", [("statistics", "std")], [[0.0, 1.0]]),
        (r"1,152,921,504,606,846,976 bytes, more than \d+ records take", [("shards", 0, "bytes")], [1 << 60]),
    ):
        for path, value in itertools.product(paths, values):
            refused(replaced(path, value), reason)


@pytest.mark.parametrize(
    ("reason", "key", "values"),
    [
        ("listed twice", "shards", [[*SHARDS, SHARDS[0]]]),
        ("starts at sample 3, not 0", "shards", [SHARDS[1:]]),
        ("variant 1 has 3 records, not 5", "shards", [SHARDS[:-1]]),
        ("starts at sample 1", "shards", [[{**SHARDS[0], "first": 1}, *SHARDS[1:]]]),
        ("variant 0 has 5 records, not 4", "samples", [4]),
        ("a variant that is not listed", "variants", [[0]]),
        ("variant 2 has 0 records", "variants", [[0, 1, 2]]),
        ("not ascending", "variants", [[1, 0], [0, 0, 1], []]),
        ("the tables are not", "tables", [[], TABLES[:1], [TABLES[0]] * 2]),
        ("not one of at most", "tables", [[*TABLES, TABLES[0]]]),
        ("not one of distinct texts", "classes", [["ant", "ant"]]),
        (r"classes\[1\]' is 1, not a string", "classes", [["ant", 1]]),
        ("2 class counts for 3 classes", "classes", [["ant", "bee", "cat"]]),
        ("there are no fields", "fields", [[]]),
        ("two fields have the same name", "fields", [[{}, {}]]),
        ("not one of at most", "fields", [[{"name": f"f{number}"} for number in range(65)]]),
        ("a record of", "fields", [[{"name": f"f{number}", "shape": [1 << 30]} for number in range(3)]]),
        ("a field has", "name", ["", "Image", "1a", "a-b", "../a", "a\n", "é"]),
        ("a field has", "dtype", ["|O", ">u2", "u1", "<U5", "<c8", "<u1,<u1"]),
        ("a field has", "codec", [""]),
        ("needs the codec", "codec", ["RAW", "pickle", "gif"]),
        ("a field cannot have shape", "shape", [[1] * 9, [1 << 16, 1 << 16, 3]]),
        ("no image has shape", "shape", [[], [2, 2], [0, 2, 3], [2, 2, 0], [1] * 4]),
        ("a field cannot have shape", "shape dtype", [([1 << 29], "<f8")]),
        ("cannot hold", "codec dtype", [("jpeg", "<f4")]),
        ("cannot hold", "codec shape", [("png", [2, 2]), ("png", [2, 2, 4]), ("png", [2, 2, 0]), ("jpeg", [0, 2, 3])]),
        ("no image has shape", "codec shape", [("raw", HUGE), ("png", HUGE), ("zstd", HUGE)]),
        ("no image has shape", "name codec shape", [("mask", "png", HUGE)]),
        ("the codec bytes is for uint8", "codec", ["bytes"]),
        ("the codec bytes is for uint8", "codec shape dtype", [("bytes", [], "<u2")]),
    ],
)
def test_what_no_writer_says_is_refused(reason: str, key: str, values: list[Any]) -> None:
    """Keys that are no manifest's are those of its only field."""
    plain = {"name": "image", "codec": "raw", "dtype": "|u1", "shape": [2, 2, 3]}
    for value in values:
        changes = dict(zip(key.split(), value if " " in key else [value], strict=True))
        if key not in content():
            changes = {"fields": [changes]}
        changes.update({name: [{**plain, **each} for each in changes[name]] for name in {"fields"} & {*changes}})
        refused({**content(), **changes}, reason)


@pytest.mark.parametrize("path", [("extra",), ("version",), ("recipe", "a"), ("shards", 0, "extra")])
@pytest.mark.parametrize("key", ["[", '{"a":'])
def test_nesting_is_limited_by_us_and_not_by_the_interpreter(path: tuple[str | int, ...], key: str) -> None:
    text = json.dumps(replaced(path, "HERE"))
    allowed = 33 - len(path)  # the value's parents are levels, too
    for levels in (allowed, allowed + 1, 100):
        nested = text.replace('"HERE"', key * levels + "0" + {"[": "]"}.get(key, "}") * levels)
        if levels == allowed and path != ("version",):
            Manifest.from_json(signed(nested))
        else:
            refused(nested, "more than 33 levels" if levels > allowed else "version")


@pytest.mark.parametrize("key", ["fields", "recipe", "samples", "sha256"])
def test_a_key_that_is_there_twice_is_refused(key: str) -> None:
    text = example().to_json()
    at = text.index(f'"{key}"')
    refused(f'{text[:at]}"{key}": null, {text[at:]}', f"the key '{key}' is there twice")


@pytest.mark.parametrize("version", [7, 8])
def test_a_cache_with_bands_of_frequencies_is_refused(version: int) -> None:
    whole = replaced(("fields", 0, "bands"), [2, 4, 8])
    refused({**whole, "version": version}, "frequency bands, which are no longer read: build the cache again")


def test_a_save_that_fails_leaves_the_manifest_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    example().save(tmp_path)
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        dataclasses.replace(example(), recipe={"seed": 1}).save(tmp_path)
    assert Manifest.load(tmp_path) == example()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"holds no manifest\.json.*run warmup again"),
        ("file", r"holds no manifest\.json.*run warmup again"),
        ("nowhere", r"nowhere does not exist\. Give the folder that `tpucache warmup` wrote\.$"),
    ],
)
def test_a_folder_without_a_manifest_is_no_cache(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotACacheError, match=message):
        Manifest.load(tmp_path / name)


def test_a_manifest_that_cannot_be_read_or_is_too_large_to_be_one_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.touch()
    os.truncate(path, fmt.MAX_MANIFEST_BYTES + 1)  # without blocks on the disk
    with pytest.raises(DamageError, match="at most 268,435,456 are read"):
        Manifest.load(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DamageError, match="cannot be read"):
        Manifest.load(tmp_path)


SHARD_SET = (shard(0, 0, 0, 3, "a" * 64), shard(0, 1, 3, 2, "b" * 64), shard(1, 0, 0, 3, "c" * 64))


def test_the_fingerprint_knows_the_clean_records_alone_and_in_their_order() -> None:
    clean = cache_fingerprint(SHA, SHARD_SET)
    assert clean == cache_fingerprint(SHA, SHARD_SET[:2]) == cache_fingerprint(SHA, SHARD_SET[::-1])
    swapped = (shard(0, 0, 0, 3, "b" * 64), shard(0, 1, 3, 2, "a" * 64))
    others = [cache_fingerprint("1" * 64, SHARD_SET), cache_fingerprint(SHA, swapped), cache_fingerprint(SHA, [])]
    assert len({clean, *others}) == 4
    assert all(len(fingerprint) == 64 for fingerprint in others)


def test_a_saved_manifest_has_the_digest_of_its_other_lines(tmp_path: Path) -> None:
    example().save(tmp_path)
    lines = (tmp_path / "manifest.json").read_text().splitlines(keepends=True)
    (line,) = (line for line in lines if line.startswith(' "digest"'))
    rest = "".join(each for each in lines if each != line)
    assert line == f' "digest": "{hashlib.sha256(rest.encode()).hexdigest()}",\n'
    assert rest == example().to_json()
    assert line[12:76] == example().identity


@pytest.mark.parametrize("bit", [*thorough(0, 1), 2, *thorough(3, 4, 5, 6), 7])
def test_each_flipped_bit_of_a_manifest_is_found(bit: int) -> None:
    text = example().text.encode()
    for at in range(len(text)):
        flipped = bytearray(text)
        flipped[at] ^= 1 << bit
        refused(bytes(flipped))


def test_a_manifest_that_was_changed_by_hand_is_refused() -> None:
    saved = json.loads(example().text)
    assert Manifest.from_json(example().text) == example()
    for changed in (content(), {**saved, "samples": 5}, {**saved, "classes": ["ant", "fly"]}, {**saved, "digest": 1}):
        refused(changed, "it has no digest, or that of another text")
    # A key of a later version is passed over.
    assert Manifest.from_json(signed({**content(), "extra": 1})) == example()


def test_names_of_values_are_stored_only_where_there_are_some_and_are_different_texts(tmp_path: Path) -> None:
    assert "value_names" not in content()
    named = dataclasses.replace(example(), classes=(), statistics=Statistics(), value_names=("width", "height"))
    named.save(tmp_path)
    assert Manifest.load(tmp_path) == named
    for wrong in (["width", "width"], [1, 2], "width", None):
        refused({**content(), "value_names": wrong}, "value_names")
