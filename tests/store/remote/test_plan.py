"""What is kept of a cache that is larger than the disk: what is needed soonest, and never something that is read."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE
from servers import Server

from tpucache import CachedDataset, CachedLoader
from tpucache.loading import loader
from tpucache.store.remote import local, requests
from tpucache.store.remote import pieces as pieces_module
from tpucache.store.remote.plan import NEVER, FetchPlan, Forecast
from tpucache.store.remote.requests import FetchRequest, NeededRecords

Opened = Callable[..., CachedDataset]


class Numbered:
    """Pieces of which each row is one, so that windows are lists of pieces."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return rows, rows


class NumberedPlan(FetchPlan):
    """A plan of such pieces."""

    def _runs(self, rows: object, pieces: object, order: np.ndarray) -> Iterator[tuple[int, None]]:
        return ((piece, None) for piece in order.tolist())


windows_of_pieces = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6), min_size=1, max_size=20)


def arrays(windows: list[list[int]]) -> Iterator[np.ndarray]:
    return iter([np.array(window) for window in windows])


@given(windows_of_pieces, st.lists(st.integers(0, 22), max_size=5))
def test_a_forecast_knows_the_next_window_that_needs_a_piece(windows: list[list[int]], reads: list[int]) -> None:
    forecast = Forecast(arrays(windows), Numbered(8), 10**6)
    for read in sorted(reads):
        forecast.go_to(read)
        expected = [
            next((at for at, window in enumerate(windows) if at >= read and piece in window), NEVER)
            for piece in range(8)
        ]
        assert forecast.next_use.tolist() == expected
        kept = np.array([1, 3, 4, 6])
        later = forecast.later_than(2, kept)
        assert [expected[piece] for piece in later] == sorted((expected[piece] for piece in later), reverse=True)
        assert set(later) == {piece for piece in kept.tolist() if expected[piece] > expected[2]}


@given(windows_of_pieces)
def test_a_plan_that_takes_its_forecast_late_has_it_as_if_from_the_start(windows: list[list[int]]) -> None:
    early, late = (NumberedPlan(arrays(windows), Numbered(8)) for _ in range(2))
    early.take(Forecast(arrays(windows), Numbered(8), 10**6))
    for plan in (early, late):
        for _ in range(5):
            if plan.is_unread:
                plan.add(plan.read())
            if plan.peek() is not None:
                plan.pop()
    late.take(Forecast(arrays(windows), Numbered(8), 10**6))
    assert early.forecast is not None
    assert late.forecast is not None
    assert early.forecast.next_use.tolist() == late.forecast.next_use.tolist()


def sums(dataset: CachedDataset, epochs: int = 6, rank: int = 1) -> list[list[int]]:
    """Return the sums of the batches that one of four hosts reads in some epochs."""
    loader = CachedLoader(dataset, 4, shuffle="block", window=8, rank=rank, world_size=4)
    return [[int(images.long().sum()) for images, _ in loader] for _ in range(epochs)]


def sums_until(is_over: Callable[[], object], dataset: CachedDataset) -> list[list[int]]:
    """Read six epochs again and again until `is_over`, and return their sums.

    The fetcher's threads may get no processor while six epochs are read once.
    """
    found: list[list[int]] = []
    for _ in range(50):
        found = sums(dataset)
        if is_over():
            break
    return found


def misses(windows: list[list[int]], room: int, *, has_forecast: bool) -> int:
    """Return how many pieces have to be fetched where this many are kept, with or without giving any up."""
    forecast = Forecast(arrays(windows), Numbered(8), 10**6)
    kept: set[int] = set()
    count = 0
    for number, window in enumerate(windows, 1):
        forecast.go_to(number)
        for piece in sorted({*window} - kept):
            count += 1
            others = forecast.later_than(piece, np.array(sorted(kept), np.int64)) if has_forecast else []
            if len(kept) == room and (free := [other for other in others if other not in window]):
                kept.remove(free[0])
            if len(kept) < room:
                kept.add(piece)
    return count


@given(windows_of_pieces, st.integers(0, 5))
def test_keeping_what_is_needed_soonest_fetches_no_more_than_keeping_what_came_first(
    windows: list[list[int]], room: int
) -> None:
    assert misses(windows, room, has_forecast=True) <= misses(windows, room, has_forecast=False)


def test_keeping_what_is_needed_soonest_fetches_less_for_one_of_several_hosts() -> None:
    random = np.random.default_rng(0)
    windows = [[int(piece)] for _ in range(16) for piece in random.permutation(8)[:2]]  # a quarter of each epoch
    assert misses(windows, 3, has_forecast=True) < 0.75 * misses(windows, 3, has_forecast=False)


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pieces that are given up in this test."""
    found: list[int] = []
    remove = local.LocalCopy._remove

    def noted(self: local.LocalCopy, piece: int) -> bool:
        found.append(piece)
        return remove(self, piece)

    monkeypatch.setattr(local.LocalCopy, "_remove", noted)
    monkeypatch.setattr(requests, "_LEAST_IN_MEMORY", 2)
    monkeypatch.setattr(requests, "_MOST_MEMORY", 0)
    return found


def test_what_one_of_several_hosts_reads_is_right_while_pieces_are_given_up(
    opened: Opened, cache: Path, given_up: list[int]
) -> None:
    assert sums_until(given_up.__len__, opened(cache_bytes=40 << 10)) == sums(CachedDataset(cache))
    assert given_up


def test_what_is_given_up_is_a_hole_that_takes_no_room_and_is_not_read(
    opened: Opened, cache: Path, given_up: list[int]
) -> None:
    dataset = opened(cache_bytes=40 << 10)
    sums_until(given_up.__len__, dataset)
    assert given_up
    copy = dataset._open_reader.cache.reader.fetcher.local
    sizes = [copy._pieces.bytes_of(piece) for piece in copy.kept.tolist()]
    assert copy.kept_bytes == sum(sizes) <= 40 << 10
    taken = sum(path.stat().st_blocks * 512 for path in dataset.directory.glob("*.lmdb"))
    assert taken <= (40 << 10) + 2 * 4096 * len(sizes)
    own = CachedDataset(cache)
    assert all(dataset[position][0].equal(own[position][0]) for position in range(len(own)))


@pytest.mark.thorough
def test_threads_that_read_while_others_are_given_up_read_no_hole(
    opened: Opened, cache: Path, given_up: list[int]
) -> None:
    dataset, own = opened(cache_bytes=30 << 10), CachedDataset(cache)
    expected = [own[position][0] for position in range(len(own))]
    wrong: list[int] = []
    over = threading.Event()

    def read_singly(seed: int) -> None:
        for position in np.random.default_rng(seed).integers(0, len(own), 4000).tolist():
            if over.is_set():
                return
            if not dataset[position][0].equal(expected[position]):
                wrong.append(position)

    threads = [threading.Thread(target=read_singly, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    found = sums(dataset, 8)
    over.set()
    for thread in threads:
        thread.join()
    assert found == sums(own, 8)
    assert given_up
    assert not wrong


def test_nothing_is_given_up_where_another_reader_has_the_folder(
    opened: Opened, cache: Path, given_up: list[int]
) -> None:
    other = opened(cache_bytes=40 << 10)
    other[0]
    assert sums(opened(cache_bytes=40 << 10)) == sums(CachedDataset(cache))
    assert not given_up


def test_where_the_file_system_frees_nothing_all_is_kept_as_it_was(
    opened: Opened, cache: Path, given_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "free_part", lambda number, start, stop: False)
    dataset = opened(cache_bytes=40 << 10)
    assert sums_until(given_up.__len__, dataset) == sums(CachedDataset(cache))
    copy = dataset._open_reader.cache.reader.fetcher.local
    assert len(given_up) == 1
    assert given_up[0] in copy.kept
    assert copy.has(copy._pieces.run(given_up[0]).numbers).any()


@pytest.mark.parametrize("kept", [None, 0])
def test_of_pieces_of_which_a_host_needs_a_part_no_more_is_read(
    opened: Opened, cache: Path, server: Server, monkeypatch: pytest.MonkeyPatch, kept: int | None
) -> None:
    """Eight neighbours go to one host, and a piece has six or seven records."""
    monkeypatch.setattr(loader, "_CHUNK_BYTES", 8 * 768)
    this_epoch = functools.partialmethod(
        loader._Iteration.expected, epochs=1
    )  # how far it gets with the next is chance
    monkeypatch.setattr(loader._Iteration, "expected", this_epoch)
    options = {"shuffle": "block", "window": 8, "rank": 1, "world_size": 3}
    dataset = opened(cache_bytes=kept)
    own = CachedLoader(CachedDataset(cache), 8, **options)
    expected = [labels.tolist() for _, labels in own]
    assert [labels.tolist() for _, labels in CachedLoader(dataset, 8, **options)] == expected
    needed = sum(map(len, expected)) * 790
    dataset._open_reader.cache.reader.close()
    read = sum(stop - start for name, start, stop in server.ranges if name.endswith(".lmdb"))
    assert read <= 1.6 * needed  # whole pieces are twice what is needed


def test_one_host_gives_nothing_up(opened: Opened, cache: Path, given_up: list[int]) -> None:
    loader = CachedLoader(opened(cache_bytes=40 << 10), 16, shuffle="block", window=8)
    own = CachedLoader(CachedDataset(cache), 16, shuffle="block", window=8)
    for _ in range(3):
        assert [labels.tolist() for _, labels in loader] == [labels.tolist() for _, labels in own]
    assert not given_up


def test_what_is_being_read_or_will_be_soon_is_not_given_up(opened: Opened, given_up: list[int]) -> None:
    dataset = opened(cache_bytes=6 << 10)  # one piece
    dataset[0]
    fetcher = dataset._open_reader.cache.reader.fetcher
    pieces = fetcher._pieces
    asked = fetcher._requests
    with fetcher._changed:  # the sample came by itself, its piece comes after it; either request may end last
        assert fetcher._changed.wait_for(lambda: not (asked.by_piece or asked._urgent_by_piece), timeout=PATIENCE)
    (kept,) = fetcher.local.kept.tolist()

    def plan_of(*needed: int) -> FetchPlan:
        windows = [pieces.run(piece).rows for piece in needed]
        plan = FetchPlan(iter(windows), pieces)
        plan.take(Forecast(iter(windows), pieces, 10**6))
        return plan

    plan = plan_of(kept + 1)
    other = plan_of(kept)
    other.add(other.read())
    owner = set[int]()  # anything that a weak reference can be to
    with fetcher._changed:  # its threads stand still
        with fetcher.local.pinned(np.array([kept, kept])):
            assert not fetcher._replace(plan, kept + 1)
        fetcher._plans.put(owner, other)
        assert not fetcher._replace(plan, kept + 1)
        fetcher._plans.note_read(pieces.of(pieces.run(kept).rows)[1])
        assert not given_up
        assert fetcher._replace(plan, kept + 1)
        assert given_up == [kept]
        assert fetcher.local.kept.tolist() == [kept + 1]


def test_what_is_here_of_a_piece_is_not_asked_for_again(opened: Opened) -> None:
    fetcher = opened().cache.reader.fetcher
    pieces, kept = fetcher._pieces, fetcher.local
    run = pieces.run(0)
    middle = int(run.rows["offset"][len(run.numbers) // 2])
    part = pieces.part(0, run.start, middle)
    assert fetcher._requests.lacking(run, 0).numbers.tolist() == run.numbers.tolist()
    assert kept.lock(0)
    assert kept.make_room(0)
    assert kept.write(part, fetcher._link.read(part))
    kept.unlock(0)
    rest = fetcher._requests.lacking(run, 0)
    assert rest.start == middle
    assert rest.stop == run.stop
    assert sorted([*rest.numbers.tolist(), *part.numbers.tolist()]) == sorted(run.numbers.tolist())


def test_records_with_little_between_them_are_one_request(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = opened().cache.reader.fetcher._pieces
    run = pieces.run(0)
    numbers, rows = run.numbers[[0, -1]], run.rows[[0, -1]]
    between = int(rows["offset"][1] - rows["offset"][0] - rows["length"][0])
    for gap, expected in ((between - 1, 2), (between, 1)):
        monkeypatch.setattr(pieces_module, "_GAP_BYTES", gap)
        found = [*pieces.runs(rows)]
        assert len(found) == expected
        if expected == 2:
            assert np.concatenate([each.numbers for each in found]).tolist() == numbers.tolist()
    assert (found[0].start, found[0].stop) == (run.start, run.stop)
    assert found[0].numbers.tolist() == run.numbers.tolist()  # all that comes is kept


def test_what_is_first_waits_for_nothing_that_comes_after_it(opened: Opened, cache: Path) -> None:
    """Another thread waits for the same piece already, which is not fetched before the first batch is here."""
    dataset = opened()
    fetcher = dataset.cache.reader.fetcher
    pieces = fetcher._pieces
    rows = pieces.run(0).rows
    owner, other_owner = set[int](), set[int]()  # anything that a weak reference can be to
    fetcher.expect(owner, iter([rows]))
    numbers, of = pieces.of(rows)
    another = FetchPlan(iter([]), pieces)
    another.is_starting = another.has_begun = True
    with fetcher._changed:  # from here on its threads begin no request for a piece
        fetcher._plans.put(other_owner, another)
        fetcher._requests.add(FetchRequest(pieces.run(0), 0))
    began = threading.Thread(target=fetcher.fetch_first, args=(NeededRecords(numbers[:1], of[:1], rows[:1]),))
    began.start()
    began.join(PATIENCE)
    assert not began.is_alive()
    assert fetcher.local.has(numbers[:1]).all()
    with fetcher._changed:
        another.is_starting = False
    fetcher.get(NeededRecords(numbers, of, rows))


def test_what_the_disk_has_no_room_for_is_kept_in_memory_and_not_asked_for_again(
    opened: Opened, cache: Path, server: Server
) -> None:
    own, dataset = (
        CachedLoader(each, 16, shuffle="block", window=32)
        for each in (CachedDataset(cache), opened(cache_bytes=20 << 10, in_memory="auto"))
    )
    expected, found = ([[labels.tolist() for _, labels in each] for _ in range(3)] for each in (own, dataset))
    assert found == expected
    fetcher = dataset.dataset.cache.reader.fetcher
    assert not next(iter(fetcher._plans)).needed
    before = len(server.ranges)
    assert [labels.tolist() for _, labels in dataset] == [labels.tolist() for _, labels in own]
    assert len(server.ranges) == before


def test_a_loader_that_takes_long_to_say_what_it_reads_stops_nobody(opened: Opened) -> None:
    """Its windows are read without the lock, by a thread that others do not wait for."""
    dataset = opened()
    fetcher, index = dataset.cache.reader.fetcher, dataset.cache.index
    pieces = fetcher._pieces
    reached, gate, ended = threading.Event(), threading.Event(), list[bool]()

    def windows() -> Iterator[np.ndarray]:
        yield pieces.run(0).rows
        reached.set()
        ended.append(gate.wait(PATIENCE))

    def records(piece: int) -> NeededRecords:
        numbers = pieces.run(piece).numbers
        return NeededRecords(numbers, np.full(len(numbers), piece), index[numbers])

    owner = set[int]()
    fetcher.expect(owner, windows())
    try:
        fetcher.fetch_first(records(0))
        assert reached.wait(PATIENCE)
        fetcher.get(records(3))
        assert fetcher.local.has(pieces.run(3).numbers).all()
        assert not ended
    finally:
        gate.set()
