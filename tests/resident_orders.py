"""Loaders in every order, of caches in every packed form: of each, resident data must give the streamed batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tpucache import CachedDataset, CachedLoader, MixedLoader, Recipe, build_cache

CODECS = ("raw", "yuv420", "dct-lz4")
SAMPLES, BATCH = 56, 16  # the last batch has 8

Make = Callable[[], Any]  # a new loader, at its first batch


def make_caches(folder: Path) -> None:
    """Build a cache of each codec, with two augmented variants; that of coefficients has images of two sizes."""
    rng = np.random.default_rng(1)
    for codec in CODECS:
        size = 32 if codec == "dct-lz4" else 16
        images = [(rng.integers(0, 256, (size, size, 3), np.uint8), number % 3) for number in range(SAMPLES)]
        build_cache(images, folder / codec, Recipe(size=size, codec=codec, variants=2), jobs=1)


def orders(cache: Path, cores: int, finish: str = "device") -> Iterator[tuple[str, list[Make]]]:
    """Yield the name of an order, and loaders whose batches one Resident gives in turn; cores divide each batch."""
    dataset = CachedDataset(cache, "epoch")
    load = functools.partial(CachedLoader, batch_size=BATCH, finish=finish, seed=3)
    dropping = functools.partial(load, drop_last=True)
    weights = np.arange(SAMPLES) % 3 + 0.5

    def resumed() -> CachedLoader:
        """A loader in the middle of its second epoch."""
        loader = dropping(dataset, shuffle=True)
        loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": BATCH})
        return loader

    def mixed() -> MixedLoader:
        one = dropping(CachedDataset(cache)[:20], shuffle=True)
        return MixedLoader([one, dropping(dataset[20:50], balance=True)], shares=[1, 3])

    yield (
        "one",
        [
            lambda: load(dataset),  # the order of the file, with a last batch of fewer
            lambda: dropping(dataset, shuffle=True),  # "full", another variant each epoch
            lambda: load(dataset, shuffle="block", window=32),
            lambda: dropping(dataset, weights=weights),
            lambda: dropping(dataset, balance=True),
            resumed,
        ],
    )
    if cache.name == "yuv420":  # what an order does to records of one packed form, it does to those of another
        return
    yield "folds", [lambda: dropping(dataset.select([5, 3, 3, *range(10, 55)]), shuffle=True)]
    yield "mixed", [mixed]
    yield "local", [lambda: dropping(dataset, shuffle="local", cores=cores)]
    if cache.name == "dct-lz4":
        yield "sizes", [lambda: dropping(CachedDataset(cache).in_resolution(16), shuffle=True)]


def named(batch: Any) -> dict[str, np.ndarray[Any, Any]]:
    """A streamed batch on the host: images (batch, height, width, channels) or packed, and labels."""
    images, labels = (np.asarray(part) for part in batch)
    return {"image": np.moveaxis(images, 1, 3) if images.ndim == 4 else images, "label": labels}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fail unless both are the same numbers."""
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def check_device(caches: Path, device: Any, cores: int) -> dict[str, list[int]]:
    """Compare each batch of all orders with the streamed ones, on a device of training.

    Return for each codec the graphs compiled and the bytes received in each epoch of the order "full".
    """
    from tpucache.ondevice import Resident
    from tpucache.training.feed import DeviceMemory, Feeder

    def run_epoch(resident: Resident, fed: Any, streaming: Any) -> None:
        with Feeder(fed, device, resident=resident) as feeder:
            for batch, host in zip(feeder, streaming, strict=True):
                found = batch.gathered()
                fetched = [device.fetch_rows(tensor) for tensor in (found.images, found.labels)]
                device.step_end()
                assert_same(dict(zip(("image", "label"), (one().numpy() for one in fetched), strict=True)), named(host))

    counted: dict[str, list[int]] = {}
    for codec in CODECS:
        for name, makes in orders(caches / codec, cores):
            resident = Resident(makes[0]().dataset, DeviceMemory(device))
            for make in makes:
                fed, streaming = make(), make()
                for _ in range(2):
                    run_epoch(resident, fed, streaming)
            assert name == "one" or cores == 1 or resident.slots.is_local == (name == "local")
            planned, rows = resident.planned_bytes, [table.rows for table in resident.tables.values()]
            assert abs(planned - sum(each.nbytes for each in rows)) <= 0.05 * planned
            if name == "one":
                fed, streaming = makes[1](), makes[1]()
                before = device.counters()
                run_epoch(resident, fed, streaming)
                after = device.counters()
                counted[codec] = [after.compiles - before.compiles, after.received_bytes - before.received_bytes]
    return counted
