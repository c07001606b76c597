"""Only a cache that begins with another's samples may take its place."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpucache.errors import UsageError
from tpucache.store.cache import Cache
from tpucache.store.copying import check_descends
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.store.samples import Strings, encode_columns

Columns = dict[str, Any]
Make = Callable[..., Cache]

PATHS = ["a.png", "b.png", "c.png"]
COLUMNS: Columns = {
    "number": np.arange(3, dtype=np.uint64),
    "path": Strings.pack(PATHS),
    "source_bytes": np.array([10, 20, 30]),
    "label": np.array([0, 1, 0]),
    "age": np.array([0.5, np.nan, 2.0]),
}


@pytest.fixture
def make(cache: Path, tmp_path: Path) -> Make:
    """The function `make(columns, classes=(), earlier=())`: a cache of a table, made by relabelling the earlier."""

    def make(columns: Columns, classes: tuple[str, ...] = (), earlier: tuple[Cache, ...] = ()) -> Cache:
        data = encode_columns(columns)
        digest = hashlib.sha256(data).hexdigest()
        folder = tmp_path / f"{digest[:16]}{len(classes)}"
        folder.mkdir()
        (folder / "samples.npz").write_bytes(data)
        manifest = Manifest.load(cache)
        changes = {
            "samples": len(columns["number"]),
            "tables": (manifest.index, FileEntry("samples.npz", len(data), digest)),
            "classes": classes,
            "source": {"relabelled": [each.manifest.table.sha256 for each in earlier]},
        }
        return Cache(folder, dataclasses.replace(manifest, **changes))

    return make


CHANGES: list[Columns] = [
    {"number": np.array([0, 1, 3], np.uint64)},
    {"path": Strings.pack([*PATHS[:2], "d.png"])},
    {"source_bytes": np.array([10, 20, 31])},
    {"label": np.array([0, 1, 1])},
    {"age": np.array([0.5, 1.0, 2.0])},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_cache_with_another_value_in_one_column_is_another(make: Make, change: Columns) -> None:
    old, new = make(COLUMNS), make({**COLUMNS, **change})
    with pytest.raises(UsageError, match="the place holds another cache"):
        check_descends(old, new, "the place")


@pytest.mark.parametrize("name", ["label", "age"])
def test_a_cache_that_lacks_a_column_is_another_and_one_with_a_new_column_is_not(make: Make, name: str) -> None:
    whole, part = make(COLUMNS), make({each: values for each, values in COLUMNS.items() if each != name})
    check_descends(part, whole, "the place")
    with pytest.raises(UsageError, match="the place holds another cache"):
        check_descends(whole, part, "the place")


def test_a_cache_with_more_samples_descends_and_one_with_fewer_does_not(make: Make) -> None:
    fewer = make(
        {name: values[:2] for name, values in COLUMNS.items() if name != "path"} | {"path": Strings.pack(PATHS[:2])}
    )
    all_samples = make(COLUMNS)
    check_descends(fewer, all_samples, "the place")
    check_descends(all_samples, all_samples, "the place")
    with pytest.raises(UsageError, match="the place holds another cache"):
        check_descends(all_samples, fewer, "the place")


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_relabelling_may_change_labels_and_columns_and_no_sample(make: Make, change: Columns) -> None:
    old, between = make(COLUMNS), make({**COLUMNS, "label": np.array([1, 1, 1])})
    new = make({**COLUMNS, **change}, earlier=(old, between))
    if {"label", "age"} & set(change):
        check_descends(old, new, "the place")
        check_descends(between, new, "the place")
    else:
        with pytest.raises(UsageError, match="the place holds another cache"):
            check_descends(old, new, "the place")
    with pytest.raises(UsageError, match="the place holds another cache"):
        check_descends(new, old, "the place")


def test_labels_are_compared_by_the_names_of_their_classes(make: Make) -> None:
    old = make(COLUMNS, classes=("ant", "cat"))
    renumbered = {**COLUMNS, "label": np.array([0, 2, 0])}
    check_descends(old, make(renumbered, classes=("ant", "bee", "cat")), "the place")
    with pytest.raises(UsageError, match="the place holds another cache"):
        check_descends(old, make(COLUMNS, classes=("ant", "bee", "cat")), "the place")
