"""Resident data gives the batches of the streaming loader, and each record is uploaded once."""

from __future__ import annotations

import functools
import itertools
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from once import once
from resident_orders import BATCH, CODECS, SAMPLES, make_caches, orders

from tpucache import CachedDataset, CachedLoader, Recipe, UsageError, build_cache
from tpucache.ondevice import Resident
from tpucache.ondevice.modules import TorchMemory, TorchTable
from tpucache.ondevice.resident import RecordBatch, RecordSlots, Tile


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "resident-orders", make_caches)


def loader(dataset: CachedDataset, finish: Any = "device", **more: Any) -> CachedLoader:
    return CachedLoader(dataset, BATCH, finish=finish, seed=3, **more)


def kept(batches: Any) -> list[Any]:
    return [tuple(part.clone() for part in batch) for batch in batches]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in itertools.zip_longest(found, expected, fillvalue=()):
        assert len(one) == len(other) > 0
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("codec", "finish"), [*((codec, "device") for codec in CODECS), ("raw", "host")])
def test_batches_are_those_of_the_streaming_loader(caches: Path, codec: str, finish: str) -> None:
    load = functools.partial(loader, CachedDataset(caches / codec), finish=finish, drop_last=True, rank=1, world_size=2)
    ranks = [[lambda shuffle=shuffle: load(shuffle=shuffle)] for shuffle in (True, "local")]
    for makes in (*(makes for _, makes in orders(caches / codec, 1, finish)), *ranks):
        resident = Resident(makes[0]().dataset)
        for make in makes:
            streaming, fed = make(), make()
            for _ in range(2):
                assert_same(kept(resident.batches(fed)), kept(streaming))
                assert fed.state_dict() == streaming.state_dict()


def test_each_record_is_uploaded_once_and_then_only_the_numbers_of_rows(caches: Path) -> None:
    dataset = CachedDataset(caches / "raw", "epoch")
    fed = loader(dataset, shuffle=True, drop_last=True)
    resident = Resident(dataset)
    assert resident.planned_bytes == 2 * SAMPLES * (16 * 16 * 3 + 8)
    sent = []
    for _ in range(6):
        before = resident.uploaded_bytes
        assert len(kept(resident.batches(fed))) == SAMPLES // BATCH
        sent.append(resident.uploaded_bytes - before)
    chunks = -(-2 * SAMPLES // BATCH)
    assert sum(sent) == resident.planned_bytes == chunks * BATCH * (16 * 16 * 3 + 8)
    assert sent[4:] == [0, 0]  # what the first epochs dropped followed in later ones
    assert resident.is_full
    assert resident.planned_bytes == sum(table.rows.untyped_storage().nbytes() for table in resident.tables.values())
    assert resident.row_bytes == 6 * (SAMPLES // BATCH) * BATCH * 4


class Failing(CachedDataset):
    """A dataset that reads nothing once it fails."""

    fails = False

    def read_records(self, *arguments: Any) -> Any:
        return 1 / 0 if self.fails else super().read_records(*arguments)

    def read_into(self, *arguments: Any) -> Any:
        return 1 / 0 if self.fails else super().read_into(*arguments)

    def hint(self, *arguments: Any) -> None:
        if self.fails:
            raise ZeroDivisionError
        super().hint(*arguments)


def test_nothing_is_read_once_all_is_there(caches: Path) -> None:
    dataset = Failing(caches / "raw")
    fed = loader(dataset, shuffle=True)
    resident = Resident(dataset)
    kept(resident.batches(fed))
    dataset.fails = True
    assert len(kept(resident.batches(fed))) == len(fed)


def test_a_loop_that_is_left_early_loses_nothing(caches: Path) -> None:
    dataset = CachedDataset(caches / "raw")
    streaming, fed = loader(dataset, shuffle=True, reiterate="same"), loader(dataset, shuffle=True, reiterate="same")
    resident = Resident(dataset)
    for left in (1, 3, 2):
        assert_same(kept(itertools.islice(resident.batches(fed), left)), kept(itertools.islice(streaming, left)))
    for _ in range(2):
        assert_same(kept(resident.batches(fed)), kept(streaming))


def test_what_does_not_fit_together_is_refused(caches: Path) -> None:
    dataset = CachedDataset(caches / "yuv420")
    resident = Resident(dataset)
    with pytest.raises(UsageError, match=r'finish="device"'):
        next(resident.batches(loader(dataset, finish="host")))
    with pytest.raises(UsageError, match="other samples"):
        next(resident.batches(loader(dataset[:20])))
    with pytest.raises(UsageError, match="without augment, normalise and device"):
        next(resident.batches(loader(dataset, normalise=True)))
    with pytest.raises(UsageError, match="cannot be used"):
        Resident(dataset, "no such device")
    running = resident.batches(loader(dataset))
    next(running)
    with pytest.raises(UsageError, match="another loop"):
        next(resident.batches(loader(dataset)))
    running.close()
    next(resident.batches(loader(dataset)))


class Rows:
    """A device's memory, with the number of the record in each row."""

    def __init__(self, slots: RecordSlots) -> None:
        self.slots, self.rows = slots, np.full(slots.rows, -1)

    def write(self, placed: RecordBatch) -> None:
        self.slots.hand_out(chunk for chunk, _ in placed.uploads)
        for chunk, members in placed.uploads:
            assert len(members) <= self.slots.chunk
            self.rows[self.slots.rows_of_chunk(chunk)[: len(members)]] = members
            self.slots.confirm(chunk)
        assert (self.rows[placed.slots] == placed.numbers).all()

    @property
    def is_right(self) -> bool:
        """Whether all records are here, each in a row of its owner."""
        records = np.arange(self.slots.records)
        placed = self.slots.place(records)
        self.write(placed)
        cores = placed.slots // self.slots.rows_a_core
        return self.slots.is_full and (self.slots.owners is None or (cores == self.slots.owners).all())


@settings(max_examples=60)
@given(
    records=st.integers(1, 60),
    each=st.integers(1, 6),
    cores=st.integers(1, 3),
    asked=st.lists(st.tuples(st.lists(st.integers(0, 59), max_size=20), st.booleans()), max_size=8),
    tile=st.sampled_from([1, 4]),
    owner=st.none() | st.integers(0, 9),
)
def test_records_have_places_of_their_own(
    records: int, each: int, cores: int, asked: list[tuple[list[int], bool]], tile: int, owner: int | None
) -> None:
    """Whatever is asked for, left unconfirmed and asked for again, a row has the record that was uploaded to it."""
    owners = None if owner is None else np.random.default_rng(owner).integers(0, cores, records)
    slots = RecordSlots(records, each * cores, cores, owners, Tile(tile, 1))
    memory = Rows(slots)
    for wanted, is_left in asked:
        placed = slots.place(np.array([number % records for number in wanted], np.int64))
        if is_left:
            slots.forget_unconfirmed()
        else:
            memory.write(placed)
    assert slots.is_full == (len(np.unique(memory.rows[memory.rows >= 0])) == records)
    assert memory.is_right
    assert slots.rows % (tile * cores) == 0


@pytest.mark.parametrize("owned", [False, True])
def test_an_interrupt_at_any_line_of_placing_leaves_no_record_without_its_bytes(owned: bool) -> None:
    owners = np.arange(30) % 2 if owned else None

    def interrupted_at(line: int) -> bool:
        """Interrupt at this line of placing; return whether it came so far, after checks of what follows."""
        slots, left = RecordSlots(30, 8, 2, owners), [line]
        memory = Rows(slots)
        memory.write(slots.place(np.arange(3)))

        def trace(frame: Any, event: str, _: Any) -> Any:
            if event == "line" and frame.f_code.co_filename.endswith("ondevice/resident.py"):
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            slots.place(np.arange(20))
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        slots.forget_planned()
        assert memory.is_right
        return left[0] <= 0

    assert sum(1 for _ in itertools.takewhile(interrupted_at, itertools.count(1))) > 20


def any_fields(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    dtypes = ("|u1", "|i1", "|b1", "<u2", "<i2", "<u4", "<i4", "<i8", "<f2", "<f4", "<f8")
    return {f"f{at}": rng.integers(0, 2, (3, at + 1)).astype(dtype) for at, dtype in enumerate(dtypes)}


def drawn(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    image, mask = rng.integers(0, 256, (8, 8, 3), np.uint8), rng.integers(0, 2, (8, 8), np.uint8)
    return {"image": image, "mask": mask, "boxes": np.array([[1, 2, 5, 6, 0]], np.float32)}


def sequence(number: int) -> dict[str, Any]:
    """Sequences of several lengths are rows of one, as the cache has them."""
    return {"text": np.arange(number + 1, dtype=np.int64), "label": 0}


@pytest.mark.parametrize("sample", [any_fields, drawn, sequence])
def test_fields_of_any_dtype_and_shape_and_columns_stay(
    sample: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    recipe = Recipe(size=8) if sample is drawn else None
    build_cache([sample(number) for number in range(9)], tmp_path / "cache", recipe, jobs=1)
    dataset = CachedDataset(tmp_path / "cache").with_columns(np.random.default_rng(0).random((9, 2), np.float32))
    resident, fed, streaming = Resident(dataset), loader(dataset, shuffle=True), loader(dataset, shuffle=True)
    for _ in range(2):
        for one, other in zip(resident.batches(fed), streaming, strict=True):
            assert one.keys() == other.keys() >= {*sample(0), "columns"} - {"label"}
            assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in other)


class Interrupted(TorchMemory):
    """A memory whose fourth write is interrupted."""

    writes = 0

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> TorchTable:
        table = super().reserve(slots, chunk)
        write = table.write

        def counted(*arguments: Any) -> None:
            self.writes += 1
            if self.writes == 4:  # the labels of the second chunk, whose images are written
                raise KeyboardInterrupt
            write(*arguments)

        table.write = counted  # type: ignore[method-assign]  # this table's own
        return table


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_what_an_error_or_an_interrupt_has_left_out_is_read_and_uploaded_again(
    caches: Path, error: type[BaseException]
) -> None:
    dataset = Failing(caches / "raw")
    streaming, fed = loader(CachedDataset(caches / "raw"), shuffle=True), loader(dataset, shuffle=True)
    resident = Resident(dataset, Interrupted("cpu") if error is KeyboardInterrupt else "cpu")
    dataset.fails = error is ZeroDivisionError
    with pytest.raises(error):
        kept(resident.batches(fed))
    dataset.fails = False
    fed.load_state_dict(streaming.state_dict())
    for _ in range(2):
        assert_same(kept(resident.batches(fed)), kept(streaming))


def test_resident_data_are_not_given_to_another_process(caches: Path) -> None:
    with pytest.raises(UsageError, match="this process's device"):
        pickle.dumps(Resident(CachedDataset(caches / "raw")))


def test_a_cache_that_was_replaced_is_not_taken_for_the_one_that_is_here(tmp_path: Path) -> None:
    def build(first: int) -> CachedDataset:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        images = [(np.full((8, 8, 3), first + number, np.uint8), 0) for number in range(16)]
        build_cache(images, tmp_path / "cache", Recipe(size=8), jobs=1)
        return CachedDataset(tmp_path / "cache")

    before = build(0)
    resident = Resident(before)
    found = kept(resident.batches(loader(before)))
    with pytest.raises(UsageError, match="other samples"):
        next(resident.batches(loader(build(100))))
    assert_same(kept(resident.batches(loader(before))), found)  # these are in memory, whatever lies in the folder
