"""The page walk finds what LMDB's own cursor finds, in any file that LMDB writes, and trusts no file."""

from __future__ import annotations

import contextlib
import io
import random
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from thorough import examples

from tpucache.errors import FormatError
from tpucache.store import pages

PAGE = 4096
ROOT_AT = 16 + 24 + 48 + 40  # in a meta page: after its header, the meta's head, the free list's record
LAST_PAGE_AT = ROOT_AT + 8

QUICK = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
SIZES = st.one_of(st.integers(0, 64), st.integers(1900, 2100), st.integers(0, 20_000))
TRANSACTIONS = st.lists(st.dictionaries(st.integers(0, 400), SIZES, max_size=12), max_size=4)


def store(path: Path, transactions: Iterable[Mapping[int, int]], seed: int = 0) -> dict[bytes, bytes]:
    """Write noise of the given sizes under the given keys with plain lmdb; return what it then holds, in its order."""
    noise = random.Random(seed)
    path.unlink(missing_ok=True)
    with lmdb.open(str(path), subdir=False, lock=False, sync=False, map_size=64 << 20, meminit=True) as env:
        for sizes in transactions:
            with env.begin(write=True) as transaction:
                for number, size in sizes.items():
                    transaction.put(number.to_bytes(8, "big"), noise.randbytes(size))
        with env.begin() as transaction:
            return dict(transaction.cursor())


def found(path: Path) -> dict[bytes, bytes]:
    data = path.read_bytes()
    with path.open("rb") as file:
        return {extent.key: data[extent.offset :][: extent.length] for extent in pages.walk(file)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages") / "store.lmdb"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a root branch, some leaves and overflow pages."""
    path = tmp_path_factory.mktemp("pages") / "tree.lmdb"
    store(path, [{number: 3000 if number % 7 == 0 else 900 for number in range(30)}])
    return path.read_bytes()


def walk_bytes(data: bytes) -> list[pages.Extent]:
    return list(pages.walk(io.BytesIO(data)))


@pytest.mark.slow
@QUICK
@given(TRANSACTIONS)
@example([])
@example([{1: 10}, {1: 20}, {1: 30, 2: 5000}])
@example([dict(enumerate([*range(2021, 2028), 4080, 4081, 8176, 8177]))])
def test_the_walk_finds_every_value_where_lmdb_has_it(path: Path, transactions: list[dict[int, int]]) -> None:
    held = store(path, transactions)
    assert list(found(path).items()) == list(held.items())


@pytest.mark.slow
def test_a_tree_of_three_levels_is_walked_in_key_order(path: Path) -> None:
    held = store(path, [dict.fromkeys(range(3000), 500)])
    with path.open("rb") as file:
        layout = pages.read_layout(file)
    assert (layout.depth, layout.entries) == (3, 3000)
    assert list(found(path).items()) == list(held.items())


def test_a_named_database_is_refused(path: Path) -> None:
    path.unlink(missing_ok=True)
    with lmdb.open(str(path), subdir=False, lock=False, sync=False, max_dbs=1) as env:
        env.open_db(b"named")
    with pytest.raises(FormatError, match="a database"):
        found(path)


@pytest.mark.parametrize("data", [b"", b"x", bytes(2 * PAGE), b"SQLite format 3\0" * 1000])
def test_what_is_no_lmdb_file_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        walk_bytes(data)


def patched(data: bytes, changes: Sequence[tuple[int, bytes]]) -> bytes:
    copy = bytearray(data)
    for at, content in changes:
        copy[at : at + len(content)] = content
    return bytes(copy)


def metas(at: int, value: int) -> list[tuple[int, bytes]]:
    """Return the changes that put a number into both meta pages."""
    return [(page + at, struct.pack("<Q", value)) for page in (0, PAGE)]


def root_nodes(tree: bytes) -> tuple[int, list[int]]:
    """Return the number of the root page and where in the file its nodes lie."""
    (root,) = struct.unpack_from("<Q", tree, PAGE + ROOT_AT)
    (lower,) = struct.unpack_from("<H", tree, root * PAGE + 12)
    pointers = struct.unpack_from(f"<{(lower - 16) // 2}H", tree, root * PAGE + 16)
    return root, [root * PAGE + pointer for pointer in pointers]


def test_a_tree_that_lmdb_does_not_write_is_refused(tree: bytes) -> None:
    root, nodes = root_nodes(tree)
    child = tree[nodes[0] : nodes[0] + 6]
    (page,) = struct.unpack_from("<H", child)
    for reason, changes in (
        ("is in the tree twice or too deep", [(nodes[0], struct.pack("<HHH", root, 0, 0))]),
        ("is in the tree twice or too deep", [(nodes[1], child)]),
        *(
            ("not an LMDB file of data format 1", [(at + 20, struct.pack("<I", version)) for at in (0, PAGE)])
            for version in (0, 2, 999)
        ),
        *(
            (f"page {page} is not a branch or leaf", [(page * PAGE + 10, struct.pack("<H", flags))])
            for flags in (0x00, 0x04, 0x08)
        ),
        *(("there is no page", metas(ROOT_AT, place)) for place in (0, 1, 10**6, 2**63, 2**64 - 2)),
        (".", [*metas(ROOT_AT, 2**63), *metas(LAST_PAGE_AT, 2**64 - 2)]),
    ):
        with pytest.raises(FormatError, match=reason):
            walk_bytes(patched(tree, changes))


def test_a_value_behind_the_end_of_the_file_is_refused(path: Path) -> None:
    store(path, [{1: 100_000}])
    data = path.read_bytes()
    with pytest.raises(FormatError, match="beyond the end"):
        walk_bytes(patched(data, metas(LAST_PAGE_AT, len(data) // PAGE - 3)))


HEADS = st.builds(lambda page, at: page * PAGE + at, st.integers(0, 15), st.sampled_from([0, 8, 10, 12, 14, 16, 18]))
PLACES = st.one_of(HEADS, st.integers(0, 200), st.integers(PAGE, PAGE + 200))
PAGE_SIZE_AT = 16 + 24


@pytest.mark.slow
@settings(max_examples=examples(200))
@example(changes=[(PAGE + PAGE_SIZE_AT + 1, b"\0")], length=16 * PAGE)
@given(
    changes=st.lists(st.tuples(PLACES, st.binary(min_size=1, max_size=2)), max_size=4),
    length=st.one_of(st.just(16 * PAGE), st.integers(0, 16 * PAGE)),
)
def test_damaged_files_raise_nothing_but_format_errors(
    tree: bytes, changes: list[tuple[int, bytes]], length: int
) -> None:
    with contextlib.suppress(FormatError):
        walk_bytes(patched(tree, changes)[:length])
