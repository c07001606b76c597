"""What `tpucache.jax.feed` gives of records that stay on eight simulated devices; run in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from resident_orders import BATCH, CODECS, SAMPLES, assert_same, named, orders
from thorough import thorough

from tpucache import CachedDataset, CachedLoader, Recipe, UsageError, build_cache
from tpucache.jax import AugmentSettings, feed
from tpucache.jax.resident import JaxMemory, KeptRecords
from tpucache.ondevice import Resident
from tpucache.ondevice.resident import DeviceFullError

CACHES = Path(os.environ["RESIDENT_CACHES"])
CORES = 8


def mesh(*axes):
    return Mesh(np.array(jax.devices()).reshape([length for _, length in axes]), [name for name, _ in axes])


DATA = NamedSharding(mesh(("data", CORES)), PartitionSpec("data"))
#: Batches divided over four devices, each with another device that has a copy.
COPIED = NamedSharding(mesh(("data", 4), ("model", 2)), PartitionSpec("data"))
BOTH = NamedSharding(mesh(("data", 4), ("model", 2)), PartitionSpec(("data", "model")))


def on_host(batch):
    return {"image": np.asarray(batch[0]), "label": np.asarray(batch[1])}


def pairs(streamed, resident):
    for one, other in zip(streamed, resident, strict=True):
        assert other[0].sharding.is_equivalent_to(one[0].sharding, one[0].ndim)
        yield on_host(other), on_host(one)


def full(codec="raw", **more):
    dataset = CachedDataset(CACHES / codec, "epoch")
    options = {"shuffle": True, "drop_last": True, "finish": "device", "seed": 3, **more}
    return CachedLoader(dataset, BATCH, **options)


@pytest.mark.parametrize("codec", ["raw", *thorough(*CODECS[1:])])
def test_batches_are_the_streamed_ones_in_every_order(codec):
    for _, makes in orders(CACHES / codec, CORES):
        resident = Resident(makes[0]().dataset, DATA)
        for make in makes:
            streamed, fed = feed(make(), DATA, resident="no"), feed(make(), DATA, resident=resident)
            for _ in range(2):
                for found, expected in pairs(streamed, fed):
                    assert_same(found, expected)
            assert fed.state_dict() == streamed.state_dict()


@pytest.mark.parametrize("sharding", [COPIED, *thorough(BOTH, SingleDeviceSharding(jax.devices()[3]))])
def test_other_axes_of_a_mesh_have_copies(sharding):
    streamed, fed = feed(full(), sharding, resident="no"), feed(full(), sharding, resident="yes")
    for _ in range(2):
        for found, expected in pairs(streamed, fed):
            assert_same(found, expected)


def test_records_in_the_memory_of_a_sharding_are_the_batches_of_a_loop_of_ones_own():
    for codec in ("raw", "yuv420"):
        loader, streamed = full(codec), full(codec)
        resident = Resident(loader.dataset, DATA)
        for _ in range(2):
            for found, expected in zip(resident.batches(loader), streamed, strict=True):
                assert_same(on_host(found), named(expected))


def test_augmented_batches_are_the_streamed_ones_and_a_short_one_is_filled_up_alike():
    settings = AugmentSettings(flip=True, shift=2, mixup=0.4)
    streamed, fed = (feed(full(), DATA, augment=settings, resident=choice) for choice in ("no", "yes"))
    for found, expected in pairs(streamed, fed):
        assert np.allclose(found["image"], expected["image"], atol=1e-5)
        assert np.allclose(found["label"], expected["label"])
    for sharding in (DATA, SingleDeviceSharding(jax.devices()[0])):
        whole = [full(shuffle=False, drop_last=False) for _ in range(2)]
        choices = zip(whole, ("no", "yes"), strict=True)
        short = [list(feed(loader, sharding, pad_last=True, resident=choice)) for loader, choice in choices]
        for one, other in zip(*short, strict=True):
            assert all(np.array_equal(*parts) for parts in zip(one, other, strict=True))
        assert np.asarray(short[1][-1][2]).sum() == SAMPLES % BATCH


def counted(feed_, step=lambda batch: None):
    """The bytes that an epoch sent, and how often something was compiled in it."""
    compiled, before = [], feed_.metrics()["upload"]["sent_bytes"]
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    with jax.transfer_guard_host_to_device("disallow"):  # what is sent is sent by the feed, and counted
        for batch in feed_:
            step(batch)
    sent = feed_.metrics()["upload"]["sent_bytes"] - before
    return sent, len([event for event in compiled if "backend_compile" in event])


def test_after_the_first_epoch_row_numbers_are_all_that_is_sent_and_nothing_compiles():
    dataset = CachedDataset(CACHES / "dct-lz4")
    options = {"shuffle": True, "drop_last": True, "finish": "device"}
    fed, streamed = (feed(CachedLoader(dataset, BATCH, **options), DATA, resident=each) for each in ("yes", "no"))
    first, compiled = counted(fed)
    assert compiled > 0
    for _ in range(2):
        assert counted(fed) == (SAMPLES // BATCH * BATCH * 4, 0)
    assert fed.metrics()["upload"]["cpu_seconds"] > 0
    assert fed.metrics()["upload"]["resident"].startswith("yes, 0.00 GB")
    assert first > counted(streamed)[0] > 100 * SAMPLES


def test_the_bytes_planned_are_those_that_lie_on_the_devices():
    import gc

    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    resident = Resident(full().dataset, DATA)
    for _ in range(2):
        for _batch in resident.batches(full()):
            pass
    del _batch
    gc.collect()
    new = [array for array in jax.live_arrays() if id(array) not in before and array.size > CORES]
    measured = sum(shard.data.nbytes for array in new for shard in array.addressable_shards)
    assert resident.planned_bytes == pytest.approx(measured, rel=0.05)
    # Rows of 768 bytes are six whole tiles wide, and each core has a multiple of 32 of them.
    assert resident.planned_bytes == CORES * 32 * (768 + 4)


def test_cores_exchange_nothing_where_each_has_the_samples_of_its_own():
    def text(loader):
        resident = Resident(loader.dataset, DATA)
        for _ in resident.batches(loader):
            pass
        table = resident.tables["image"]
        slots = jax.device_put(np.zeros(BATCH, np.int32), DATA)
        return jax.jit(table.form.taken).lower(table.rows, slots).compile().as_text()

    exchanges = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    local = text(full(shuffle="local", cores=CORES))
    assert not any(name in local for name in exchanges)
    assert any(name in text(full()) for name in exchanges)


def test_loaders_that_need_records_elsewhere_are_refused():
    resident = Resident(full().dataset, DATA)
    next(resident.batches(full(shuffle="local", cores=CORES)))
    for other in (full(), full(shuffle="local", cores=CORES, seed=4), full(shuffle="local", cores=4)):
        for batches in (resident.batches(other), feed(other, DATA, resident=resident)):
            with pytest.raises(UsageError, match=r"^(?!another loop).*make another Resident"):
                next(batches)
    with pytest.raises(UsageError, match="pad_last"):
        feed(full(shuffle="local", cores=CORES, drop_last=False), DATA, pad_last=True)
    with pytest.raises(UsageError, match="first axis"):
        Resident(full().dataset, NamedSharding(BOTH.mesh, PartitionSpec("data", "model")))
    shared = Resident(full().dataset, DATA)
    one, other = (feed(full(), DATA, resident=shared) for _ in range(2))
    next(one)
    with pytest.raises(UsageError, match="another loop"):
        next(other)
    one.close()
    next(feed(full(), DATA, resident=shared))


class Roomy(JaxMemory):
    """Devices that say how much memory they have."""

    free = 1 << 30

    def free_bytes(self):
        return self.free


@pytest.fixture
def roomy(monkeypatch):
    monkeypatch.setattr("tpucache.jax.resident.JaxMemory", Roomy)
    monkeypatch.setattr("tpucache.jax.resident._problem_of_auto", lambda memory: "")
    return monkeypatch


@pytest.mark.parametrize(("free", "expected"), [(1 << 30, "yes"), *thorough((1 << 10, "no"))])
def test_auto_decides_by_what_the_first_steps_leave(roomy, free, expected):
    roomy.setattr(Roomy, "free", free)
    streamed, fed = feed(full(), DATA, resident="no"), feed(full(), DATA)
    for epoch in range(3):
        assert fed.metrics()["upload"]["resident"].startswith(expected if epoch else "no")
        for found, other in pairs(streamed, fed):
            assert_same(found, other)


def test_where_there_is_no_room_after_all_batches_are_sent_and_that_is_said_once(roomy, caplog):
    def refuse(*_):
        raise DeviceFullError("9 GB of records do not fit")

    roomy.setattr(JaxMemory, "reserve", refuse)
    streamed, fed = feed(full(), DATA, resident="no"), feed(full(), DATA)
    for _ in range(3):
        for found, other in pairs(streamed, fed):
            assert_same(found, other)
    assert len([record for record in caplog.records if "do not fit" in record.message]) == 1
    with pytest.raises(DeviceFullError):
        next(feed(full(), DATA, resident="yes"))


def test_on_a_processor_auto_keeps_nothing():
    assert KeptRecords(full(), DATA, "auto").describe().endswith("the devices' memory is the host's")


def test_masks_boxes_and_columns_stay_bit_by_bit(tmp_path):
    rng, samples = np.random.default_rng(0), []
    for number in range(16):
        boxes = np.array([[-0.0, -0.0, 5, 6, 0], [1, 2, 3 + number / 4, 7, 1]], np.float32)
        mask, near = rng.integers(0, 2, (8, 8), np.uint8), rng.random(3) < 0.5
        image = rng.integers(0, 256, (8, 8, 3), np.uint8)
        samples.append({"image": image, "mask": mask, "boxes": boxes, "near": near})
    build_cache(samples, tmp_path / "cache", Recipe(size=8), jobs=1)
    dataset = CachedDataset(tmp_path / "cache").with_columns(np.float32([[np.nan, -0.0]] * 16))
    streamed, fed = (feed(CachedLoader(dataset, 8, shuffle=True), DATA, resident=choice) for choice in ("no", "yes"))
    for _ in range(2):
        for one, other in zip(streamed, fed, strict=True):
            assert one.keys() == other.keys() >= {"image", "mask", "boxes", "columns"}
            for name, array in one.items():
                assert array.dtype == other[name].dtype
                assert np.asarray(array).tobytes() == np.asarray(other[name]).tobytes(), name
