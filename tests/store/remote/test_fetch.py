"""Whole pieces are fetched once, in the order of reading, and wait for nobody else."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE
from servers import Server

from tpucache import CachedDataset, CachedLoader, DamageError, Recipe, StoreError, build_cache
from tpucache.store.cache import Cache
from tpucache.store.remote.local import Pieces

Opened = Callable[..., CachedDataset]


@pytest.mark.parametrize("size", [1, 5 << 10, 1 << 40])
def test_each_record_is_in_one_piece_of_neighbours(cache: Path, size: int) -> None:
    opened = Cache.open(cache)
    pieces, index = Pieces(opened, size), opened.index.read_all()
    found = [pieces[number] for number in range(len(pieces))]
    assert sorted(np.concatenate([piece.numbers for piece in found])) == list(range(len(index)))
    for number, piece in enumerate(found):
        assert (index[piece.numbers] == piece.rows).all()
        assert piece.start == piece.rows["offset"].min()
        assert piece.stop == (piece.rows["offset"] + piece.rows["length"]).max()
        part = piece.rows.copy()
        part["offset"], part["length"] = part["offset"] + 5, part["length"] - 9
        for rows in (piece.rows, part):
            numbers, of = pieces.of(rows)
            assert (numbers == piece.numbers).all()
            assert (of == number).all()
    assert pieces.bytes.sum() == sum(entry.bytes for entry in opened.manifest.shards)
    every = pieces.of_shards(np.arange(len(opened.manifest.shards)))
    assert every.tolist() == list(range(len(pieces)))
    assert len(pieces) == {1: len(index), 1 << 40: len(opened.manifest.shards)}.get(size, len(pieces))


def test_rows_outside_of_all_records_are_refused(cache: Path) -> None:
    opened = Cache.open(cache)
    rows = opened.index[np.arange(2)].copy()
    rows["length"][1] += 1
    with pytest.raises(DamageError, match="has no record at the requested bytes of v00-00000"):
        Pieces(opened).of(rows)
    lying = Cache.open(cache)
    lying.index.read_all().base["offset"][3] = 1 << 40
    with pytest.raises(DamageError, match="where no record can be"):
        Pieces(lying)[0]


@pytest.mark.parametrize("kept", [0, 20 << 10])
def test_what_the_disk_has_no_room_for_is_kept_in_memory_until_it_is_read(
    opened: Opened, cache: Path, server: Server, kept: int
) -> None:
    dataset = opened(cache_bytes=kept)
    own, found = (CachedLoader(each, 16, shuffle="block", window=32) for each in (CachedDataset(cache), dataset))
    for _ in range(2):
        assert [labels.tolist() for _, labels in found] == [labels.tolist() for _, labels in own]
    dataset.close()
    places = {(name, place) for name, start, stop in server.ranges for place in range(start, stop)}
    assert server.sent <= 3.5 * len(places)  # two epochs, and a part of the next


def serve(folder: Path, images: np.ndarray) -> tuple[Server, CachedDataset]:
    build_cache([*zip(images, range(len(images)), strict=True)], folder / "cache", Recipe(size=images.shape[1]), jobs=1)
    server = Server(folder / "cache")
    return server, CachedDataset(server.url, cache_dir=folder, in_memory=False)


def test_a_chunk_of_a_block_order_needs_no_piece_of_another(tmp_path: Path) -> None:
    server, dataset = serve(tmp_path, np.zeros((160, 150, 150, 3), np.uint8))
    chunk = CachedLoader(dataset, 8, shuffle="block").state_dict()["chunk"]
    _, pieces = Pieces(dataset.cache).of(dataset.cache.index.read_all())
    assert not {*pieces[:chunk]} & {*pieces[chunk:]}
    server.close()


def test_samples_that_nobody_has_announced_are_not_read_alone_for_ever(tmp_path: Path) -> None:
    server, dataset = serve(tmp_path, np.zeros((450, 16, 16, 3), np.uint8))
    order = np.argsort(dataset.cache.index.read_all(), order=("shard", "offset"))
    ends = order[[0, dataset.manifest.shards[0].records // 3]]
    for _ in range(30):
        dataset.__getitems__(ends)
    dataset.close()
    server.close()
    assert len(server.ranges) == 2  # the records alone, and their piece


def test_the_first_batch_waits_for_no_piece_and_only_its_bytes_are_fetched_twice(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (26, 448, 448, 3), np.uint8)
    server, dataset = serve(tmp_path, pixels)
    server.longest = pixels[0].nbytes
    found = iter(CachedLoader(dataset, 1, shuffle=True))
    batches = [next(found)]
    server.gate.set()
    batches += found
    assert len(batches) == 26
    for images, label in batches:
        assert np.array_equal(images[0].permute(1, 2, 0), pixels[label.item()])
    dataset.close()
    connected = f"raddr={server.server_address}"
    assert not [each for each in gc.get_objects() if isinstance(each, socket.socket) and connected in repr(each)]
    server.close()
    assert server.sent <= sum(entry.bytes for entry in dataset.manifest.shards) + server.longest


def test_a_loader_that_takes_long_to_say_what_it_reads_stops_nobody(opened: Opened, cache: Path) -> None:
    dataset, reached, gate = opened(), threading.Event(), threading.Event()

    def windows() -> Iterator[np.ndarray]:
        yield np.arange(1)
        reached.set()
        gate.wait(PATIENCE)

    owner = set[int]()  # anything that a weak reference can be to
    dataset.cache.reader.expect(owner, [0], windows)
    try:
        assert reached.wait(PATIENCE)
        assert dataset[149][0].equal(CachedDataset(cache)[149][0])
    finally:
        gate.set()


def test_a_reader_that_waits_while_its_cache_is_closed_gets_an_error(opened: Opened, server: Server) -> None:
    dataset, asked, gate = opened(), threading.Event(), threading.Event()

    def fault(name: str, _: int) -> None:
        if name.endswith(".lmdb"):
            asked.set()
            gate.wait(PATIENCE)

    server.fault = fault
    with ThreadPoolExecutor() as pool:
        try:
            read = pool.submit(dataset.__getitem__, 0)
            assert asked.wait(PATIENCE)
            dataset.cache.reader.close()
            with pytest.raises(StoreError, match="waiting for records was given up"):
                read.result(PATIENCE)
        finally:
            gate.set()
