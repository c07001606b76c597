"""A stream of items is copied once, and builds the cache that the same items by number build."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from made import build_here, png
from stops import Stopped, stop_after
from torch.utils.data import IterableDataset

from tpucache import CachedDataset, Recipe, build_cache
from tpucache.errors import SampleError, SourceError
from tpucache.store.manifest import Manifest
from tpucache.warmup.sources import DatasetSource
from tpucache.warmup.sources.datasets import is_stream
from tpucache.warmup.sources.kept import decoded, encoded
from tpucache.warmup.sources.source import Item

RECIPE = Recipe(size=8, variants=1)


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPUCACHE_DIR", str(tmp_path / "here"))
    return tmp_path / "here" / "sources"


class Stream:
    def __init__(self, items: list[Any]) -> None:
        self.items, self.times = items, 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        for item in self.items:
            if isinstance(item, Exception):
                raise item
            yield item


def items(count: int = 20) -> list[Any]:
    return [{"image": png(n), "label": n % 3, "name": f"n{n}", "weight": n / 7} for n in range(count)]


class Torch(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter([(np.full((4, 4, 3), n, np.uint8), n % 2) for n in range(8)])

    def __len__(self) -> int:
        return 8


def numbers() -> Iterator[Any]:
    return ({"input_ids": list(range(n + 1)), "label": n % 2} for n in range(6))


def test_a_stream_makes_the_cache_that_its_items_by_number_make(tmp_path: Path, copies: Path) -> None:
    found = build_cache(Stream(items()), tmp_path / "a", RECIPE, jobs=2)
    expected = build_here(items(), tmp_path / "b", RECIPE)
    assert [entry.sha256 for entry in found.shards] == [entry.sha256 for entry in expected.shards]
    assert (tmp_path / "a" / "samples.npz").read_bytes() == (tmp_path / "b" / "samples.npz").read_bytes()
    assert not [*copies.iterdir()]


@pytest.mark.parametrize(("source", "samples"), [(Torch(), 8), (f"{__name__}:numbers", 6), (f"{__name__}:Torch", 8)])
def test_streams_of_torch_and_generators_are_sources(tmp_path: Path, source: Any, samples: int) -> None:
    build_here(source, tmp_path / "cache", Recipe(size=4))
    assert len(CachedDataset(tmp_path / "cache")) == samples


def stopped(cache: Path) -> Stream:
    stream = Stream(items())
    with pytest.raises(Stopped):
        build_here(stream, cache, RECIPE, on_progress=stop_after(-1))
    return stream


def test_a_build_that_is_continued_asks_the_stream_for_nothing(tmp_path: Path, copies: Path) -> None:
    stream = stopped(tmp_path / "a")
    assert len([*copies.iterdir()]) == 1
    found = build_here(stream, tmp_path / "a", RECIPE)
    assert stream.times == 1
    expected = build_here(items(), tmp_path / "b", RECIPE)
    assert Manifest.load(tmp_path / "a").fingerprint == expected.fingerprint == found.fingerprint
    assert not [*copies.iterdir()]


@pytest.mark.parametrize("place", [b"IHDR", b'"weight": '])
def test_a_copy_that_was_changed_between_two_runs_is_made_again(tmp_path: Path, copies: Path, place: bytes) -> None:
    stream = stopped(tmp_path / "a")
    (path,) = copies.iterdir()
    data = bytearray(path.read_bytes())
    data[data.rindex(place) + len(place)] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"the copy was changed after it was made.*: run the same command again"):
        build_here(stream, tmp_path / "a", RECIPE)
    found = build_here(stream, tmp_path / "a", RECIPE)
    assert stream.times == 2
    assert found.fingerprint == build_here(items(), tmp_path / "b", RECIPE).fingerprint


@pytest.mark.parametrize("name", ["here/sources/*", "a/*/listings"])
def test_what_was_cut_short_between_two_runs_is_made_again(tmp_path: Path, name: str) -> None:
    stream = stopped(tmp_path / "a")
    (path,) = tmp_path.glob(name)
    path.write_bytes(path.read_bytes()[:-1])
    build_here(stream, tmp_path / "a", RECIPE)
    assert stream.times == 2


def test_a_copy_that_is_not_whole_is_made_again(tmp_path: Path, copies: Path) -> None:
    stream = Stream([*items(5), RuntimeError("the network is gone")])
    for _ in range(2):
        with pytest.raises(SourceError, match=r"Stream raised RuntimeError after 5 items: the network is gone. Run"):
            build_here(stream, tmp_path / "a")
    stream.items.pop()
    build_here(stream, tmp_path / "a")
    assert stream.times == 3
    assert len(CachedDataset(tmp_path / "a")) == 5


def test_an_item_that_cannot_be_kept_is_named_when_it_is_needed(tmp_path: Path) -> None:
    stream = Stream([*items(3), {"text": "no picture"}, *items(2)])
    with pytest.raises(SampleError, match=r"'3': has no image and no array among its keys text"):
        build_here(stream, tmp_path / "a")
    assert build_here(stream, tmp_path / "b", on_error="skip").samples == 5


def test_a_copy_outside_of_a_build_goes_with_its_source_which_is_no_broken_sample(copies: Path) -> None:
    source = DatasetSource(Stream(items(4)))
    listing = source.list()
    assert [sample.path for sample in listing.samples] == ["0", "1", "2", "3"]
    sent = pickle.loads(pickle.dumps(source))  # to a worker
    assert sent.load(listing.samples[2]).fields["image"] == png(2)
    assert len([*copies.iterdir()]) == 1
    del source
    assert not [*copies.iterdir()]
    with pytest.raises(SourceError, match="run the same command again") as caught:
        sent.load(listing.samples[2])
    assert not isinstance(caught.value, SampleError)


fields = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.binary(max_size=20)
    | arrays.arrays(
        st.sampled_from(["<f4", "|u1", "<i8", "|b1", "<f8"]), arrays.array_shapes(min_dims=0, min_side=0, max_side=3)
    ),
    max_size=4,
)
columns = st.dictionaries(st.text(max_size=4), st.text() | st.integers() | st.floats(allow_nan=False), max_size=3)


@given(fields, columns)
def test_what_is_copied_is_what_was_given(fields: dict[str, Any], columns: dict[str, str | int | float]) -> None:
    found = decoded(encoded(Item(fields, columns=columns)))
    assert found.columns == columns
    assert [*found.fields] == [*fields]
    for name, value in fields.items():
        if isinstance(value, bytes):
            assert found.fields[name] == value
        else:
            assert found.fields[name].dtype == value.dtype
            assert np.array_equal(found.fields[name], value, equal_nan=value.dtype.kind == "f")
            assert found.fields[name].shape == value.shape


@pytest.mark.parametrize(
    ("dataset", "expected"), [([1], False), ({}, False), (iter([1]), True), (Torch(), True), (Stream([]), True)]
)
def test_what_is_a_stream(dataset: Any, expected: bool) -> None:
    assert is_stream(dataset) is expected
