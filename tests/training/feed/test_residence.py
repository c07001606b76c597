"""Training records that stay in the device's memory: the same run, and after the first epoch only rows are sent."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tpucache import CachedDataset, CachedLoader, Recipe, UsageError, build_cache
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training import RunOptions, TrainSettings
from tpucache.training.device import CpuDevice
from tpucache.training.feed.feeder import Feeder
from tpucache.training.feed.residence import MOST_OF_FREE, Residence
from tpucache.training.interrupt import Stopped
from tpucache.training.loop import train

pytestmark = pytest.mark.slow

SETTINGS = TrainSettings(
    model="tiny_models:tiny", epochs=3, batch_size=16, lr=0.02, augment=AugmentSettings(flip=True, shift=2)
)
RECORD = 16 * 16 * 3 + 8  # bytes, with the label

ON_XLA = """
import sys
import numpy as np
import torch
from tpucache import CachedDataset, CachedLoader
from tpucache.ondevice import Resident
from tpucache.training.device import open_device
from tpucache.training.feed.feeder import Feeder
from tpucache.training.feed.residence import DeviceMemory

dataset = CachedDataset(sys.argv[1], "epoch").select(range(40))
device = open_device("xla", int(sys.argv[2]))
weights = np.arange(len(dataset)) % 3 + 0.5
streaming, fed = (CachedLoader(dataset, 16, finish="device", weights=weights, drop_last=True) for _ in range(2))
resident = Resident(dataset, DeviceMemory(device))
compiles = []
for _ in range(4):
    with Feeder(fed, device, resident=resident) as feeder:
        for batch, (images, labels) in zip(feeder, streaming, strict=True):
            found = batch.gathered()
            fetched = [device.fetch_rows(tensor) for tensor in (found.images, found.labels)]
            device.step_end()
            assert torch.equal(fetched[0](), images.permute(0, 2, 3, 1)) and torch.equal(fetched[1](), labels)
    compiles.append(device.counters().compiles)
assert compiles[0] == compiles[-1], compiles
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 64 pixels as packed coefficients, from which other sizes are made."""
    rng = np.random.default_rng(0)
    images = [(rng.integers(0, 256, (64, 64, 3), np.uint8), number % 3) for number in range(40)]
    build_cache(images, tmp_path_factory.mktemp("packed") / "cache", Recipe(size=64, codec="dct-lz4"), jobs=1)
    return tmp_path_factory.getbasetemp() / next(tmp_path_factory.getbasetemp().glob("packed*")).name / "cache"


def run(folder: Path, choice: str, dataset: CachedDataset, settings: TrainSettings = SETTINGS, **more: Any) -> Any:
    options = RunOptions(resident=choice, replay=False, **more)
    return train(folder / choice, settings, dataset, None, CpuDevice(), options)


@pytest.mark.parametrize(
    "changes", [{}, {"balance": True, "accumulate": 2}, {"steps_per_execution": 2}], ids=["full", "balance", "several"]
)
def test_the_losses_are_those_of_a_streaming_run(cache: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    dataset, settings = CachedDataset(cache, "epoch").select(range(40)), dataclasses.replace(SETTINGS, **changes)
    streaming, resident = (run(tmp_path, choice, dataset, settings) for choice in ("no", "yes"))
    assert resident.losses == streaming.losses


def test_images_that_grow_are_those_of_a_streaming_run(packed: Path, tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, grow="32:0.5,64", epochs=4)
    streaming, resident = (run(tmp_path, choice, CachedDataset(packed), settings) for choice in ("no", "yes"))
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
    assert Residence("auto", SETTINGS, dataset, CpuDevice()).describe().endswith("the device's memory is the host's")
    needed = 3 * 40 * RECORD
    for free, expected in ((needed / MOST_OF_FREE + 1, "yes"), (needed / MOST_OF_FREE - 9, "no")):
        residence = Residence("auto", SETTINGS, dataset, Accelerator(int(free)))
        assert residence.planned_bytes == needed
        assert residence.describe().startswith("no")
        residence.decide()
        assert residence.describe().startswith(expected), residence.describe()
    with pytest.raises(UsageError, match="GB left"):
        Residence("yes", SETTINGS, dataset, Accelerator(needed - 1))


def test_the_batches_are_the_same_before_and_after_auto_decides(cache: Path) -> None:
    dataset, device = CachedDataset(cache).select(range(40)), CpuDevice()
    residence = Residence("auto", SETTINGS, dataset, Accelerator(1 << 40))
    residence._device = device
    streaming, fed = (CachedLoader(dataset, 8, shuffle=True, drop_last=True, reiterate="same") for _ in range(2))
    found = []
    with Feeder(residence.batches(fed, 5), device, depth=1, resident=residence) as feeder:
        for batch in feeder:
            found.append(batch.gathered())
            residence._is_decided = residence._is_resident = True
    assert batch.rows is not None
    for one, (images, labels) in zip(found, streaming, strict=True):
        assert torch.equal(one.images, images.permute(0, 2, 3, 1))
        assert torch.equal(one.labels, labels)


@pytest.mark.xla
def test_batches_on_the_cores_of_xla_are_those_of_the_loader(python: Any, cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "rows.py"
    script.write_text(ON_XLA)
    done = python(script, cache, 2, devices=2)
    assert done.returncode == 0, done.stderr[-3000:]
