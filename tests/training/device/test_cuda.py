"""What only a real GPU can show: how far the loop runs ahead, what counts as busy, and which memory results are in."""

from __future__ import annotations

import time

import pytest
import torch
from running import train_on

from tpucache import CachedDataset, CachedLoader, Recipe, build_cache
from tpucache.training.device import CpuDevice, open_device
from tpucache.training.evaluation import compute_rows
from tpucache.training.feed import Feeder
from tpucache.training.forward import make_finish
from tpucache.training.learner import Learner
from tpucache.training.settings import TrainSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is found"),
    pytest.mark.filterwarnings("default"),  # torch's own, of another release than the one that the tests are pinned to
]

CYCLES = 20_000_000  # of a GPU: some hundredths of a second
SETTINGS = TrainSettings(
    model="tiny_models:tiny", epochs=2, batch_size=16, optimizer="sgd", lr=0.02, precision="float32", threads=1
)


@pytest.fixture
def gpu():
    device = open_device("torch", device="cuda")
    device.tf32 = False
    return device


@pytest.fixture(scope="module")
def packed(photos, tmp_path_factory):
    """A cache whose images the device decodes."""
    path = tmp_path_factory.mktemp("packed") / "cache"
    build_cache(photos, path, Recipe(size=32, codec="dct-lz4"), jobs=1)
    return path


def take_steps(device, count, rest=0.0):
    for number in range(count):
        device.step_begin(number)
        torch.cuda._sleep(CYCLES)
        device.step_end()
        yield number
        time.sleep(rest)


def test_the_loop_is_two_executions_ahead_and_no_more(gpu):
    left = [sum(not ended.query() for _, ended in gpu._executions) for _ in take_steps(gpu, 8)]
    gpu.wait()
    assert max(left) == 2


def test_time_in_which_nothing_was_sent_is_not_busy(gpu):
    gpu.wait()
    before, began, rest = gpu.counters().execute_seconds, time.perf_counter(), 0.2
    for _ in take_steps(gpu, 3, rest):
        gpu.wait()
    busy, wall = gpu.counters().execute_seconds - before, time.perf_counter() - began
    assert 0 < busy <= wall - 3 * rest


def test_steps_that_overlap_count_once(gpu):
    gpu.wait()
    before, began = gpu.counters().execute_seconds, time.perf_counter()
    for _ in take_steps(gpu, 6):
        continue
    gpu.wait()
    assert 0 < gpu.counters().execute_seconds - before <= time.perf_counter() - began


def test_each_step_decodes_its_own_batch_however_late_the_device_is(gpu, packed):
    dataset = CachedDataset(packed)
    found = {}
    for device in (CpuDevice(), gpu):
        loader, finish, means = CachedLoader(dataset, 8, finish="device", pin_memory=device.pin_memory), None, []
        finish = make_finish(dataset, device)
        with Feeder(loader, device) as feeder:
            for number, batch in enumerate(feeder):
                device.step_begin(number)
                if device is gpu:
                    torch.cuda._sleep(CYCLES)  # later batches arrive meanwhile
                means.append(device.fetch(finish(batch).images.float().mean((1, 2, 3))))
                device.step_end()
        found[device.torch_device.type] = torch.cat([mean() for mean in means])
        loader.close()
    torch.testing.assert_close(found["cuda"], found["cpu"], atol=0.5, rtol=0)
    assert found["cpu"].std() > 1  # other batches would show


def test_batches_are_read_into_page_locked_memory_and_results_are_not_kept_there(gpu, packed):
    dataset = CachedDataset(packed)
    with CachedLoader(dataset, 8, pin_memory=True) as loader:
        assert next(iter(loader))[0].is_pinned()
    results = [part for (part,) in compute_rows(dataset, gpu, 8, 1, lambda batch: (batch.labels.clone(),))]
    assert [int(label) for part in results for label in part] == dataset.labels.tolist()
    assert not any(torch.from_numpy(part).is_pinned() for part in results)


def test_a_run_learns_as_on_the_cpu_and_leaves_torchs_settings_as_they_were(gpu, cache, tmp_path, monkeypatch):
    dataset, seen, step = CachedDataset(cache).select(range(72)), [], Learner.step
    monkeypatch.setattr(Learner, "step", lambda *given: [seen.append(torch.backends.cudnn.benchmark), step(*given)][1])
    before = torch.backends.cudnn.benchmark
    losses = {}
    for device in (CpuDevice(), gpu):
        del seen[:]
        run = tmp_path / device.torch_device.type
        report = train_on(run, SETTINGS, dataset, dataset, device=device, replay=device is gpu)
        losses[device.torch_device.type] = [*report.losses, *(row["valid_loss"] for row in report.epochs)]
    assert losses["cuda"] == pytest.approx(losses["cpu"], abs=1e-3)
    assert all(seen)
    assert torch.backends.cudnn.benchmark == before
    assert report.device_peak_bytes > 0
    assert 0 <= report.pace.device_idle <= 1
