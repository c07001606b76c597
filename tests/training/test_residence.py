"""Records that stay on the device give the batches of records that are sent."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resident_orders
import torch
from once import once
from resident_orders import BATCH, CODECS, SAMPLES, check_device, make_caches
from running import train_on
from thorough import thorough

from tpucache import CachedDataset, CachedLoader, Recipe, UsageError, build_cache
from tpucache.ondevice.draws import draw
from tpucache.ondevice.modules import TorchTable
from tpucache.ondevice.resident import MOST_OF_FREE, DeviceFullError, RecordSlots, Resident
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training import RunOptions, TrainSettings
from tpucache.training.device import CpuDevice
from tpucache.training.device.base import DeviceBatch
from tpucache.training.feed import DeviceMemory, Feeder, TrainingResidence
from tpucache.training.interrupt import Stopped
from tpucache.training.loop import train

pytestmark = pytest.mark.slow

SETTINGS = TrainSettings(
    model="tiny_models:tiny", epochs=3, batch_size=16, lr=0.02, augment=AugmentSettings(flip=True, shift=2)
)
RECORD = 16 * 16 * 3 + 8  # bytes, with the label


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Images of 64 pixels as packed coefficients, from which other sizes are made."""
    rng = np.random.default_rng(0)
    images = [(rng.integers(0, 256, (64, 64, 3), np.uint8), number % 3) for number in range(40)]
    build_cache(images, tmp_path / "cache", Recipe(size=64, codec="dct-lz4"), jobs=1)
    return tmp_path / "cache"


def run(folder: Path, choice: str, dataset: CachedDataset, settings: TrainSettings = SETTINGS, **more: Any) -> Any:
    options = RunOptions(resident=choice, replay=False, **more)
    return train(folder / choice, settings, dataset, None, CpuDevice(), options)


@pytest.mark.parametrize(
    "changes",
    [{}, {"balance": True, "accumulate": 2}, {"steps_per_execution": 2}, {"grow": "32:0.5,64", "epochs": 4}],
    ids=["full", "balance", "several", "grow"],
)
def test_the_losses_are_those_of_a_streaming_run(
    cache: Path, packed: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = dataclasses.replace(SETTINGS, **changes)
    dataset = CachedDataset(packed) if "grow" in changes else CachedDataset(cache, "epoch").select(range(40))
    streaming, resident = (run(tmp_path, choice, dataset, settings) for choice in ("no", "yes"))
    assert resident.losses == streaming.losses


def test_after_the_first_epoch_only_rows_and_random_numbers_are_sent(cache: Path, tmp_path: Path) -> None:
    dataset = CachedDataset(cache).select(range(40))
    plain = dataclasses.replace(SETTINGS, augment=AugmentSettings())
    streaming, resident = (run(tmp_path, choice, dataset, plain).pace for choice in ("no", "yes"))
    assert streaming.later_bytes_per_step - resident.later_bytes_per_step == 16 * RECORD - 16 * 4
    assert resident.resident.startswith("yes, 0.00 GB of records in the device's memory")
    assert resident.feeding_cpu is not None


def test_a_run_that_is_stopped_continues_as_a_streaming_one_does(cache: Path, tmp_path: Path) -> None:
    class Stopping:
        def losses(self, first: int, values: Any) -> None:
            if first + len(values) > 3:
                raise Stopped("now")

        def epoch(self, row: Any) -> None:
            pass

    dataset = CachedDataset(cache).select(range(40))
    whole = run(tmp_path, "no", dataset)
    with pytest.raises(Exception):  # noqa: B017, PT011  # however it is stopped
        run(tmp_path, "yes", dataset, watchers=[Stopping()], checkpoint_every=1)
    assert run(tmp_path, "yes", dataset, resume=True).losses == whole.losses


class Accelerator(CpuDevice):
    """A CPU that says how much memory it has left, as a GPU does."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free, self.torch_device = free, torch.device("meta")

    def free_bytes(self) -> int:
        return self.free


def test_auto_keeps_what_fits_into_what_the_steps_leave(cache: Path) -> None:
    dataset = CachedDataset(cache, "epoch").select(range(40))
    on_host = TrainingResidence("auto", SETTINGS, dataset, CpuDevice())
    assert on_host.describe().endswith("the device's memory is the host's")
    needed = 128 * RECORD  # chunks of 16 that hold the 120 records
    for free, expected in ((needed / MOST_OF_FREE + 1, "yes"), (needed / MOST_OF_FREE - 9, "no")):
        residence = TrainingResidence("auto", SETTINGS, dataset, Accelerator(int(free)))
        assert residence.planned_bytes == needed
        assert residence.describe().startswith("no")
        residence.decide()
        assert residence.describe().startswith(expected), residence.describe()
    with pytest.raises(UsageError, match="GB left"):
        TrainingResidence("yes", SETTINGS, dataset, Accelerator(needed - 1))


def test_the_batches_are_the_same_before_and_after_auto_decides(cache: Path) -> None:
    dataset, device = CachedDataset(cache).select(range(40)), CpuDevice()
    residence = TrainingResidence("auto", SETTINGS, dataset, Accelerator(1 << 40))
    residence.memory = DeviceMemory(device)
    streaming, fed = (CachedLoader(dataset, 8, shuffle=True, drop_last=True, reiterate="same") for _ in range(2))
    found = []
    with Feeder(residence.batches(fed, 5), device, depth=1, resident=residence) as feeder:
        for batch in feeder:
            found.append(batch.gathered())
            residence.is_resident = True
    assert batch.rows is not None
    for one, (images, labels) in zip(found, streaming, strict=True):
        assert torch.equal(one.images, images.permute(0, 2, 3, 1))
        assert torch.equal(one.labels, labels)


@pytest.mark.parametrize("changes", [{}, {"loss": "tiny_tasks:faint_loss"}])
def test_samples_to_validate_on_stay_and_give_the_same_metrics(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    whole, settings = CachedDataset(cache), dataclasses.replace(SETTINGS, **changes)
    train_set, valid_set = whole.select(range(40)), whole.select(range(40, 75))  # with a short last batch
    uploads: list[Resident] = []
    put = Resident.put

    def spied(self: Resident, batches: Any) -> Any:
        uploads.extend([self] * sum(len(batch.uploads) for batch in batches))
        return put(self, batches)

    monkeypatch.setattr(Resident, "put", spied)
    reports = [train_on(tmp_path / choice, settings, train_set, valid_set, resident=choice) for choice in ("no", "yes")]
    assert [{**row} for row in reports[0].epochs] == [{**row} for row in reports[1].epochs]
    assert reports[0].losses == reports[1].losses
    # Three chunks of training, and three to validate on, the last of which was uploaded when it was compiled.
    assert sorted(uploads.count(each) for each in {*uploads}) == [3, 3]


def refuse(*_: Any) -> Any:
    raise DeviceFullError("9 GB of records do not fit")


@pytest.mark.parametrize("fails", ["train", "valid"])
def test_where_there_is_no_room_after_all_the_run_goes_on_and_says_so_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    whole = CachedDataset(cache)
    train_set, valid_set = whole.select(range(40)), whole.select(range(40, 75))
    expected = train_on(tmp_path / "no", SETTINGS, train_set, valid_set, resident="no", replay=True)

    class Roomy(CpuDevice):
        """A CPU that says that it has room, and at once or later has none."""

        def free_bytes(self) -> int:
            return 1 << 40

        def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> TorchTable:
            # Samples to validate on are reserved for first, in chunks of the same size.
            reserved.append(slots)
            is_valid = slots is reserved[0]
            return refuse() if is_valid == (fails == "valid") else super().reserve(slots, chunk)

    reserved: list[RecordSlots] = []
    monkeypatch.setattr("tpucache.training.feed._problem_of_auto", lambda _: "")
    found = train_on(tmp_path / "auto", SETTINGS, train_set, valid_set, device=Roomy(), resident="auto", replay=True)
    assert found.losses == expected.losses
    assert [{**row} for row in found.epochs] == [{**row} for row in expected.epochs]
    assert len([record for record in caplog.records if "do not fit" in record.message]) == 1
    assert found.pace.resident.startswith("no" if fails == "train" else "yes")
    reserved.clear()
    with pytest.raises(UsageError, match="do not fit"):
        train_on(tmp_path / "yes", SETTINGS, train_set, valid_set, device=Roomy(), resident="yes", replay=True)


class CountingDevice(CpuDevice):
    """Counts how often something is sent, and how many bytes."""

    sent, sent_bytes = 0, 0

    def put(self, batch: torch.Tensor) -> torch.Tensor:
        self.sent, self.sent_bytes = self.sent + 1, self.sent_bytes + batch.nbytes
        return super().put(batch)

    def put_all(self, batches: Any) -> list[torch.Tensor]:
        return [*self.put(torch.stack([*batches])).unbind()]


def test_rows_of_many_batches_are_sent_at_once_and_counted_one_by_one(cache: Path) -> None:
    dataset, device = CachedDataset(cache).select(np.arange(4000) % 40), CountingDevice()
    settings = AugmentSettings(flip=True)

    def loader() -> CachedLoader:
        return CachedLoader(dataset, 16, shuffle=True, drop_last=True)

    def drawn(number: int) -> Any:
        return draw(settings, 0, number, 16)

    streaming, kept = loader(), loader()
    resident = Resident(dataset, DeviceMemory(device))
    for epoch in range(2):
        streaming.set_epoch(epoch)
        kept.set_epoch(epoch)
        device.sent = device.sent_bytes = 0
        own = [*itertools.islice(streaming, 200)]
        with Feeder(kept, device, draw=drawn, resident=resident) as feeder:
            for number, ((images, labels), batch) in enumerate(zip(own, feeder, strict=False)):
                gathered = batch.gathered()
                assert torch.equal(gathered.images.permute(0, 3, 1, 2), images)
                assert torch.equal(gathered.labels, labels)
                assert batch.draws is not None
                assert np.array_equal(batch.draws.numpy(), drawn(number))
                if number == 199:
                    assert kept.state_dict()["position"] == 200 * 16
                    break
    assert device.sent <= 40  # for 200 batches, read up to 3 x 64 further
    assert device.sent_bytes <= (200 + 3 * 64) * 16 * (4 + drawn(0)[0].nbytes)


def test_an_error_comes_after_the_batches_that_were_read_before_it(cache: Path) -> None:
    dataset, device = CachedDataset(cache).select(np.arange(4000) % 40), CpuDevice()
    loader, resident = CachedLoader(dataset, 16), Resident(dataset, DeviceMemory(device))

    def failing() -> Any:
        for number, batch in enumerate(resident.pairs(loader)):
            if number == 100:
                raise ValueError("the 100th")
            yield batch

    taken: list[Any] = []
    with Feeder(failing(), device, resident=resident) as feeder, pytest.raises(ValueError, match="the 100th"):
        taken.extend(map(DeviceBatch.gathered, feeder))
    assert len(taken) == 100
    other = CachedLoader(dataset[:32], 16)
    for _ in range(2):  # a loop that could not begin ends
        with pytest.raises(UsageError, match="has other samples"), Feeder(other, device, resident=resident):
            pass


ON_XLA = """
import json, sys
from pathlib import Path

sys.path.append(sys.argv[1])
from resident_orders import check_device
from tpucache.training.device import open_device

cores = int(sys.argv[3])
print(json.dumps(check_device(Path(sys.argv[2]), open_device("xla", cores), cores)))
"""


#: Of each codec: what compiled in an epoch after all records were uploaded, and the bytes that were received in it.
ROWS_ALONE = {codec: [0, SAMPLES // BATCH * BATCH * 4] for codec in CODECS}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "resident-orders", make_caches)


@pytest.mark.thorough
def test_batches_are_the_streamed_ones_on_plain_torch(caches: Path) -> None:
    assert check_device(caches, CpuDevice(), 1) == ROWS_ALONE


@pytest.mark.xla
@pytest.mark.parametrize("cores", [1, *thorough(8)])
def test_batches_are_the_streamed_ones_on_cores_of_xla_which_receive_row_numbers_alone(
    on_xla: Any, caches: Path, cores: int
) -> None:
    found = on_xla(ON_XLA, Path(resident_orders.__file__).parent, caches, cores, devices=cores)
    assert json.loads(found.splitlines()[-1]) == ROWS_ALONE
