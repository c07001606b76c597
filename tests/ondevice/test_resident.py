"""Resident data gives the batches of the streaming loader, and each record is uploaded once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache import CachedDataset, CachedLoader, MixedLoader, Recipe, UsageError, build_cache
from tpucache.ondevice import Resident
from tpucache.ondevice.slots import RecordSlots

SAMPLES = 46
BATCH = 8


@pytest.fixture(scope="module")
def caches(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """150 images with three augmented variants as raw pixels, and 46 without any in two packed forms."""
    folder = tmp_path_factory.mktemp("resident")
    rng = np.random.default_rng(1)
    images = [(rng.integers(0, 256, (16, 16, 3), np.uint8), number % 3) for number in range(SAMPLES)]
    for codec in CODECS[1:]:
        build_cache(images, folder / codec, Recipe(size=16, codec=codec), jobs=1)
    return {"raw": cache, "yuv420": folder / "yuv420", "dct-lz4": folder / "dct-lz4"}


def weights(dataset: CachedDataset) -> np.ndarray[Any, Any]:
    return np.arange(len(dataset)) % 3 + 0.5


def mixed(cache: Path) -> MixedLoader:
    """Two loaders: of some samples in one variant, and of others, one of them twice, that change variants."""
    one = CachedLoader(CachedDataset(cache)[:20], BATCH, shuffle=True, finish="device", drop_last=True)
    chosen = CachedDataset(cache, "epoch").select([30, 22, 22, *range(31, 45)])
    other = CachedLoader(chosen, BATCH, balance=True, seed=2, finish="device", drop_last=True)
    return MixedLoader([one, other], shares=[1, 3])


def loader(dataset: CachedDataset, **more: Any) -> CachedLoader:
    return CachedLoader(dataset, BATCH, finish="device", seed=3, **more)


CODECS = ("raw", "yuv420", "dct-lz4")

ORDERS: dict[str, Callable[[Path], Any]] = {
    "file": lambda cache: loader(CachedDataset(cache)),
    "full": lambda cache: loader(CachedDataset(cache), shuffle=True, drop_last=True),
    "block": lambda cache: loader(CachedDataset(cache, "epoch"), shuffle="block", window=16),
    "weights": lambda cache: loader(CachedDataset(cache), weights=weights(CachedDataset(cache))),
    "balance": lambda cache: loader(CachedDataset(cache, "epoch"), balance=True, drop_last=True),
    "fold": lambda cache: loader(CachedDataset(cache, "epoch").select([5, 3, 3, *range(10, 45)]), shuffle=True),
    "mixed": mixed,
    "rank": lambda cache: loader(CachedDataset(cache), shuffle=True, drop_last=True, rank=1, world_size=2),
    "host": lambda cache: CachedLoader(CachedDataset(cache), BATCH, shuffle=True),
}


def kept(batches: Any) -> list[Any]:
    return [tuple(part.clone() for part in batch) for batch in batches]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in itertools.zip_longest(found, expected, fillvalue=()):
        assert len(one) == len(other) > 0
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("order", "codec"),
    # Other codecs are decoded on the host where it finishes, and refused below.
    [(order, codec) for order in ORDERS for codec in CODECS if order != "host" or codec == "raw"],
)
def test_batches_are_those_of_the_streaming_loader(caches: dict[str, Path], order: str, codec: str) -> None:
    streaming, other = ORDERS[order](caches[codec]), ORDERS[order](caches[codec])
    resident = Resident(streaming.dataset)
    for _ in range(4):
        assert_same(kept(resident.batches(other)), kept(streaming))
        assert other.state_dict() == streaming.state_dict()


def test_each_record_is_uploaded_once_and_then_only_the_numbers_of_rows(caches: dict[str, Path]) -> None:
    dataset = CachedDataset(caches["raw"], "epoch").select(range(SAMPLES))
    fed = loader(dataset, shuffle=True, drop_last=True)
    resident = Resident(dataset)
    sent = []
    for _ in range(6):
        before = resident.uploaded_bytes
        assert len(kept(resident.batches(fed))) == SAMPLES // BATCH
        sent.append(resident.uploaded_bytes - before)
    chunks = -(-3 * SAMPLES // BATCH)
    assert resident.planned_bytes == 3 * SAMPLES * (16 * 16 * 3 + 8)
    assert sum(sent) == chunks * BATCH * (16 * 16 * 3 + 8)
    assert sent[4:] == [0, 0]  # what three epochs dropped followed in the fourth
    assert resident.is_full
    assert resident.row_bytes == 6 * (SAMPLES // BATCH) * BATCH * 4


def test_the_last_records_that_fill_no_batch_follow_in_the_first_epoch(caches: dict[str, Path]) -> None:
    dataset = CachedDataset(caches["raw"])
    resident = Resident(dataset)
    kept(resident.batches(loader(dataset, shuffle=True, drop_last=True)))
    assert resident.is_full


def test_nothing_is_read_once_all_is_there(caches: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = CachedDataset(caches["raw"])
    fed = loader(dataset, shuffle=True)
    resident = Resident(dataset)
    kept(resident.batches(fed))
    monkeypatch.setattr(CachedDataset, "read_records", None)
    monkeypatch.setattr(CachedDataset, "read_into", None)
    monkeypatch.setattr(CachedDataset, "hint", None)
    assert len(kept(resident.batches(fed))) == len(fed)


def test_a_loop_that_is_left_early_loses_nothing(caches: dict[str, Path]) -> None:
    dataset = CachedDataset(caches["raw"])
    streaming, fed = loader(dataset, shuffle=True, reiterate="same"), loader(dataset, shuffle=True, reiterate="same")
    resident = Resident(dataset)
    for left in (1, 3, 2):
        assert_same(kept(itertools.islice(resident.batches(fed), left)), kept(itertools.islice(streaming, left)))
    for _ in range(2):
        assert_same(kept(resident.batches(fed)), kept(streaming))


def test_a_loop_is_continued_in_the_middle_of_an_epoch(caches: dict[str, Path]) -> None:
    dataset = CachedDataset(caches["raw"], "epoch")
    streaming, fed = loader(dataset, shuffle=True), loader(dataset, shuffle=True)
    kept(itertools.islice(streaming, 3))
    fed.load_state_dict(streaming.state_dict())
    streaming.load_state_dict(streaming.state_dict())
    resident = Resident(dataset)
    for _ in range(2):
        assert_same(kept(resident.batches(fed)), kept(streaming))


def test_an_error_in_reading_is_raised_and_the_records_are_read_again(
    caches: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = CachedDataset(caches["raw"])
    streaming, fed = loader(dataset, shuffle=True), loader(dataset, shuffle=True)
    resident = Resident(dataset)
    with monkeypatch.context() as patch:
        patch.setattr(CachedDataset, "read_records", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kept(resident.batches(fed))
    assert_same(kept(resident.batches(fed)), kept(streaming))


def test_columns_come_with_the_records(caches: dict[str, Path]) -> None:
    dataset = CachedDataset(caches["raw"])
    dataset = dataset.with_columns(np.arange(2 * len(dataset), dtype=np.float32).reshape(-1, 2))
    resident = Resident(dataset)
    for _ in range(2):
        for one, other in zip(resident.batches(loader(dataset)), loader(dataset), strict=True):
            assert one.keys() == other.keys() == {"image", "columns", "label"}
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_fields_of_any_dtype_and_shape_stay_as_they_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    dtypes = ("|u1", "|i1", "|b1", "<u2", "<i2", "<u4", "<i4", "<i8", "<f2", "<f4", "<f8")
    samples = [
        {f"f{at}": rng.integers(0, 2, (3, at + 1)).astype(dtype) for at, dtype in enumerate(dtypes)} for _ in range(9)
    ]
    build_cache(samples, tmp_path / "fields", jobs=1)
    dataset = CachedDataset(tmp_path / "fields")
    resident = Resident(dataset)
    for _ in range(2):
        fed, streaming = CachedLoader(dataset, 4, shuffle=True), CachedLoader(dataset, 4, shuffle=True)
        for one, other in zip(resident.batches(fed), streaming, strict=True):
            assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in other)


def test_what_does_not_fit_together_is_refused(caches: dict[str, Path]) -> None:
    dataset = CachedDataset(caches["yuv420"])
    resident = Resident(dataset)
    with pytest.raises(UsageError, match=r'finish="device"'):
        next(resident.batches(CachedLoader(dataset, BATCH)))
    with pytest.raises(UsageError, match="other samples"):
        next(resident.batches(loader(dataset[:20])))
    with pytest.raises(UsageError, match="without augment, normalise and device"):
        next(resident.batches(CachedLoader(dataset, BATCH, finish="device", normalise=True)))
    with pytest.raises(UsageError, match="cannot be used"):
        Resident(dataset, "no such device")
    running = resident.batches(loader(dataset))
    next(running)
    with pytest.raises(UsageError, match="another loop"):
        next(resident.batches(loader(dataset)))
    running.close()
    next(resident.batches(loader(dataset)))


@settings(max_examples=40)
@given(
    records=st.integers(1, 60),
    each=st.integers(1, 6),
    cores=st.integers(1, 3),
    asked=st.lists(st.tuples(st.lists(st.integers(0, 59), max_size=20), st.booleans()), max_size=8),
)
def test_records_have_places_of_their_own(
    records: int, each: int, cores: int, asked: list[tuple[list[int], bool]]
) -> None:
    """Whatever is asked for, left unconfirmed and asked for again, a row has the record that was uploaded to it."""
    slots = RecordSlots(records, each * cores, cores)
    memory = np.full((cores, slots.rows // cores), -1)
    for wanted, is_left in asked:
        numbers = np.array([number % records for number in wanted], np.int64)
        placed = slots.place(numbers)
        if is_left:
            slots.forget_unconfirmed()
            continue
        slots.hand_out(chunk for chunk, _ in placed.missing)
        for chunk, members in placed.missing:
            assert len(members) <= slots.chunk
            padded = np.resize(members, slots.chunk).reshape(cores, each)
            memory[:, chunk * each : (chunk + 1) * each] = padded
            slots.confirm(chunk)
        assert (memory.reshape(-1)[placed.slots] == numbers).all()
    assert slots.is_full == (len(np.unique(memory[memory >= 0])) == records)
