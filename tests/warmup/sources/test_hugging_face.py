"""A dataset of Hugging Face is a source; without its library, so are the rows that it would give."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import build_here, png

from tpucache import CachedDataset, Recipe

NAMES = ["ant", "bee"]
COUNT = 10

needs_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs datasets")


def _rows(broken: int | None = None, key: str = "image") -> list[dict[str, Any]]:
    """Return rows as the library gives them with undecoded images; one image may be cut short."""
    images = [png(number)[: 40 if number == broken else None] for number in range(COUNT)]
    return [
        {key: {"bytes": data, "path": f"{number}.png"}, "label": number % 2, "age": number / 2}
        for number, data in enumerate(images)
    ]


def _dataset(rows: list[dict[str, Any]]) -> Any:
    import datasets

    key = next(iter(rows[0]))
    features = datasets.Features(
        {key: datasets.Image(), "label": datasets.ClassLabel(names=NAMES), "age": datasets.Value("float32")}
    )
    return datasets.Dataset.from_list(rows, features=features)


def _invert(rows: dict[str, Any]) -> dict[str, Any]:
    return {"image": [255 - np.asarray(image) for image in rows["image"]], "label": rows["label"]}


KINDS = [pytest.param(_dataset, marks=needs_datasets, id="datasets.Dataset"), pytest.param(list, id="rows")]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_become_a_cache(kind: Callable[..., Any], tmp_path: Path) -> None:
    manifest = build_here(kind(_rows()), tmp_path)
    assert manifest.statistics.class_counts == (5, 5)
    data = CachedDataset(tmp_path)
    assert [int(data[number][0][0, 0, 0]) for number in range(COUNT)] == [number * 9 for number in range(COUNT)]
    assert np.asarray(data.table["age"]).tolist() == [number / 2 for number in range(COUNT)]


@needs_datasets
def test_names_of_classes_and_the_choice_of_rows_are_those_of_the_dataset(tmp_path: Path) -> None:
    chosen = _dataset(_rows(key="img")).shuffle(seed=1).filter(lambda row: row["label"] == 1).select(range(3))
    manifest = build_here(chosen, tmp_path)
    assert manifest.classes == tuple(NAMES)
    data = CachedDataset(tmp_path)
    assert data.labels is not None
    assert data.labels.tolist() == [1, 1, 1]
    assert np.asarray(data.table["age"]).tolist() == chosen["age"][:]
    assert int(data[0][0][0, 0, 0]) == chosen["age"][0] * 2 * 9


@needs_datasets
def test_items_that_the_user_transforms_are_taken_as_they_come(tmp_path: Path) -> None:
    build_here(_dataset(_rows()).with_transform(_invert), tmp_path, Recipe(size=9))
    assert [int(image[0, 0, 0]) for image, _ in CachedDataset(tmp_path)] == [255 - n * 9 for n in range(COUNT)]


@needs_datasets
def test_a_stream_becomes_the_cache_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUCACHE_DIR", str(tmp_path / "here"))
    rows = _dataset(_rows(key="photo"))
    found = build_here(rows.to_iterable_dataset(num_shards=2), tmp_path / "a")
    expected = build_here(rows, tmp_path / "b")
    assert (found.fingerprint, found.classes) == (expected.fingerprint, tuple(NAMES))
