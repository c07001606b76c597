"""Uploads during the computation, and the time of executions, on a stand-in for a GPU (see streams.py)."""

from __future__ import annotations

import gc
import warnings
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from running import train_on
from streams import StandIn, install, open_cuda
from thorough import thorough
from torch import nn

from tpucache import CachedDataset, CachedLoader, UsageError
from tpucache.training.device import CpuDevice, open_device
from tpucache.training.device.torch_device import AcceleratorDevice, CudaDevice, compiled_graphs
from tpucache.training.evaluation import compute_rows
from tpucache.training.learner import Learner
from tpucache.training.lr_finder import find_lr
from tpucache.training.settings import TrainSettings

CPU = torch.device("cpu")
STEP, BATCH, STEPS = 0.25, 4, 30


@pytest.fixture
def module(monkeypatch):
    return install(monkeypatch, StandIn())


@pytest.fixture
def cuda(module):
    return open_cuda(module)


def test_a_batch_is_copied_on_its_own_stream_and_the_computing_waits_for_it(cuda, module):
    batch = torch.arange(12.0).view(3, 4)
    sent = cuda.put(batch)
    assert module.log == [("copy", "copy")]
    assert not torch.equal(sent, batch)  # it is on its way, and nobody has waited for it
    cuda.receive([sent])
    assert module.log[1:] == [("wait", "compute", "copy"), ("record", "compute")]
    assert torch.equal(sent, batch)
    assert sent.data_ptr() != batch.data_ptr()


def test_what_is_read_back_waits_for_its_own_copy_and_for_nothing_that_was_sent_later(cuda, module):
    first, second = (cuda.fetch(torch.full((3,), value)) for value in (1.0, 2.0))
    del module.log[:]
    assert first().tolist() == [1, 1, 1]
    assert module.log == [("synchronize", "compute")]
    assert len(module.compute.work) == 2  # the second copy and its event have not been waited for
    assert second().tolist() == [2, 2, 2]
    assert not module.compute.work


@pytest.mark.slow
def test_the_hosts_batch_is_kept_until_its_copy_has_ended_and_no_longer(cuda):
    batch = torch.ones(5)
    kept = weakref.ref(batch)
    sent = cuda.put(batch)
    del batch
    gc.collect()
    assert kept() is not None
    cuda.receive([sent])
    gc.collect()
    assert kept() is None


@pytest.mark.slow
def test_batches_that_nobody_takes_are_let_go_of_once_they_are_copied(cuda):
    batch = torch.ones(5)
    kept = weakref.ref(batch)
    cuda.put(batch)
    del batch
    cuda.wait()
    gc.collect()
    assert kept() is None


SETTINGS = TrainSettings(
    model="tiny_models:tiny",
    epochs=2,
    batch_size=16,
    accumulate=2,
    lr=0.02,
    ema=0.9,
    precision="float32",
    threads=1,
)


@pytest.fixture(scope="module")
def expected(cache, tmp_path_factory):
    """The losses of the same run on the CPU, in steps and in evaluations."""
    dataset = CachedDataset(cache).select(range(72))
    report = train_on(tmp_path_factory.mktemp("cpu"), SETTINGS, dataset, dataset)
    return losses_of(report)


def losses_of(report):
    return [*report.losses, *(row["valid_loss"] for row in report.epochs if "valid_loss" in row)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CudaDevice, AcceleratorDevice])
def test_a_run_computes_with_the_batches_as_they_were_read(cache, tmp_path, module, expected, kind):
    device, dataset = kind(CPU, module), CachedDataset(cache).select(range(72))
    device.pin_memory = False
    report = train_on(tmp_path, SETTINGS, dataset, dataset, device=device, replay=True)
    assert losses_of(report) == pytest.approx(expected, abs=1e-5)  # another layout sums in another order
    assert (report.backend, report.device) == ("torch", "cpu")
    assert report.pace.ceiling_idle is not None
    assert {name for name, *_ in module.log} >= ({"copy", "wait", "record"} if kind is CudaDevice else {"synchronize"})


def test_the_loop_never_runs_more_than_two_executions_ahead(module):
    device, left = AcceleratorDevice(CPU, module), []
    for number in range(6):
        device.step_begin(number)
        device.step_begin(number)  # two steps in one execution
        device.step_end()
        device.step_end()  # an evaluation's batch, which is no execution
        left.append(sum(not ended.query() for _, ended in device._executions))
    assert left == [1, 2, 2, 2, 2, 2]


def test_an_execution_counts_from_its_first_step_to_its_end():
    world = SimpleNamespace(now=0.0)
    device = AcceleratorDevice(CPU, StandIn(lambda: world.now))
    for _ in range(3):
        for _ in range(2):
            device.step_begin(0)
            world.now += STEP
        device.step_end()
        world.now += 7.0
    device.wait()
    assert device.counters().execute_seconds == pytest.approx(3 * 2 * STEP)


def test_the_random_numbers_of_host_and_device_are_as_before(cuda):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with cuda.preserve_rng():
        torch.rand(7)
    assert torch.equal(torch.rand(2), expected)


@pytest.fixture
def tpu(monkeypatch, module):
    """A torch that has TorchTPU's device, up to its tensors; `started` is whether somebody has asked for it."""
    state, plain = SimpleNamespace(started=False, error=None), torch.device

    def current_device():
        state.started = True
        if state.error:
            raise RuntimeError(state.error)
        return 0

    module.current_device = current_device
    here = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: SimpleNamespace(type="tpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "accelerator", here, raising=False)
    monkeypatch.setattr(torch, "tpu", module, raising=False)
    monkeypatch.setattr(torch, "device", lambda kind, index=0: plain("cpu" if kind == "tpu" else kind, index))
    return state


def test_a_tpu_is_found_without_starting_it_and_is_fed_by_blocking_copies(tpu, module):
    assert type(open_device("torch", device="cpu")) is CpuDevice
    assert not tpu.started
    device = open_device("torch")
    assert tpu.started
    assert type(device) is AcceleratorDevice
    assert not device.pin_memory
    assert device.put(torch.ones(2)).tolist() == [1, 1]
    assert device.counters().received_bytes == 8
    assert device.peak_bytes() is None


def test_a_device_that_does_not_start_is_an_error_that_says_why(tpu):
    tpu.error = "held by process 7"
    with pytest.raises(UsageError, match="'tpu' is there but does not start: held by process 7"):
        open_device("torch", device="tpu")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")  # torch
def test_models_are_compiled_in_place_where_that_is_asked_for(monkeypatch):
    compile_, plain = torch.compile, open_device("torch", device="cpu")
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    model, images = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()), torch.rand(2, 3, 5, 5)
    names, expected, before = sorted(model.state_dict()), plain.place(model)(images), compiled_graphs()
    assert compiled_graphs() == before
    device = open_device("torch", device="cpu", compile=True)
    assert device.place(model) is model
    for _ in range(2):
        torch.testing.assert_close(model(images), expected)
    assert device.counters().compiles == before + 1
    assert sorted(model.state_dict()) == names


@pytest.mark.thorough
@pytest.mark.xla
def test_what_compiles_by_itself_is_not_compiled_again():
    with pytest.raises(UsageError, match="leave --compile out"):
        open_device("xla", compile=True)


@pytest.fixture
def pinned(monkeypatch):
    """Count the page-locked memory that is asked for, and give other memory."""
    empty, sizes = torch.empty, []

    def allocate(*shape, pin_memory=False, **options):
        if pin_memory:
            sizes.append(shape[0])
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    return sizes


def test_batches_are_read_into_page_locked_memory_that_is_theirs_alone(cache, pinned):
    dataset = CachedDataset(cache)
    plain, loader = CachedLoader(dataset, 32), CachedLoader(dataset, 32, pin_memory=True)
    ahead = len(pinned)
    assert ahead == 4  # torch has memory for those that are read ahead
    batches = list(loader)
    assert len(pinned) == ahead + len(batches)
    assert set(pinned) == {32 * batches[0][0][0].numel()}
    for (images, labels), (expected, numbers) in zip(batches, plain, strict=True):
        assert torch.equal(images, expected)
        assert torch.equal(labels, numbers)
    loader.close()


@pytest.fixture
def products():
    """torch's settings of products, which are the process's and as they were after the test."""
    products_now()  # torch warns once
    yield products_now
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def products_now():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("tf32", [True, *thorough(False)])
def test_a_run_computes_products_in_tf32_and_leaves_torchs_setting_as_it_was(
    cache, tmp_path, cuda, monkeypatch, products, tf32
):
    dataset, seen, settings = CachedDataset(cache).select(range(32)), [], replace(SETTINGS, epochs=1)
    cuda.tf32 = tf32
    for name in ("step", "predict"):
        method = getattr(Learner, name)
        monkeypatch.setattr(Learner, name, lambda *given, of=method: [seen.append(products()), of(*given)][1])
    train_on(tmp_path / "run", settings, dataset, dataset, device=cuda)
    assert set(seen) == {("high", True) if tf32 else ("highest", False)}
    assert len(seen) >= 2 + 2
    assert products() == ("highest", True)
    del seen[:]
    find_lr(tmp_path / "find", settings, dataset, cuda)
    assert set(seen) == {("high", True) if tf32 else ("highest", False)}
    with pytest.raises(KeyError), cuda.fast_products():
        raise KeyError
    assert products() == ("highest", True)


def test_predictions_are_computed_in_tf32_too(cache, cuda, products):
    seen = []

    def compute(batch):
        seen.append(products())
        return (batch.labels,)

    for _ in compute_rows(CachedDataset(cache).select(range(20)), cuda, 16, 1, compute):
        pass
    assert seen == [("high", True)] * 2
    assert products() == ("highest", True)


def test_products_that_a_program_has_chosen_itself_stay_as_they_are(cuda, products):
    torch.set_float32_matmul_precision("medium")
    with cuda.fast_products():
        assert products() == ("medium", True)
    assert products() == ("medium", True)
    with CpuDevice().fast_products():
        assert products() == ("medium", True)
