"""What the processes of a group exchange in each step, with a stand-in for torch's exchange between them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tpucache import CachedDataset, UsageError
from tpucache.training.device import CpuDevice, Processes, process_group
from tpucache.training.device.base import DeviceBatch
from tpucache.training.device.process_group import ProcessGroup
from tpucache.training.evaluation import compile_evaluation
from tpucache.training.interrupt import Stopped, StopRequest
from tpucache.training.learner import Learner
from tpucache.training.optimizers import buffers_of_steps
from tpucache.training.schedule import Rates
from tpucache.training.settings import TrainSettings
from tpucache.training.tasks.find import make_task


class Exchange:
    """As torch.distributed exchanges: what one process begins is there once all have begun it."""

    ReduceOp = SimpleNamespace(MAX="max")

    def __init__(self, processes):
        self.processes, self.begun, self.log = processes, [], []

    def all_reduce(self, values, how, group, async_op):
        assert (how, async_op) == ("max", True)
        rank, number = group, sum(rank == group for rank, _ in self.begun)
        self.begun.append((rank, values))
        self.log.append(("begin", rank, number))
        return SimpleNamespace(wait=lambda: self._wait(rank, number, values))

    def _wait(self, rank, number, values):
        self.log.append(("wait", rank, number))
        rounds = [[kept for of, kept in self.begun if of == each] for each in range(self.processes)]
        assert all(len(kept) > number for kept in rounds), "it would wait for a slower process"
        values.copy_(torch.stack([kept[number].clone() for kept in rounds]).max(0).values)


@pytest.fixture
def exchange(monkeypatch):
    found = Exchange(2)
    monkeypatch.setattr(process_group, "dist", found)
    return found


def process(rank, world_size=2):
    """A process of a group that nobody has started."""
    made = object.__new__(ProcessGroup)
    made.rank, made.world_size, made._group = rank, world_size, rank
    return made


def stops_after(requests, signalled, steps=6):
    """Return after which steps each of several requests stops, where one of them is signalled in a step."""
    found = {}
    for step in range(steps):
        if step == signalled:
            requests[1]._is_signalled = True
        for rank, request in enumerate(requests):
            if rank not in found:
                try:
                    request.check("there")
                except Stopped:
                    found[rank] = step
    return found


def test_a_process_that_is_ahead_does_not_wait_in_a_check_and_all_stop_at_the_same_step(exchange):
    requests = [StopRequest(), StopRequest()]
    for rank, request in enumerate(requests):
        request.share(process(rank).largest_before())
    assert stops_after(requests, signalled=2) == {0: 3, 1: 3}
    assert exchange.log[:4] == [("begin", 0, 0), ("begin", 1, 0), ("begin", 0, 1), ("wait", 0, 0)]
    for request in requests:
        assert isinstance(request.to_error(Stopped("x")), KeyboardInterrupt)


def test_a_process_alone_stops_at_once():
    request = StopRequest()
    request.share(Processes().largest_before())
    assert stops_after([StopRequest(), request], signalled=2) == {1: 2}


def test_running_statistics_of_norms_are_not_read_in_steps_and_other_buffers_are():
    class Counting(nn.BatchNorm2d):
        def __init__(self) -> None:
            super().__init__(2)
            self.register_buffer("own", torch.zeros(1))

    model = nn.Sequential(nn.BatchNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True), Counting())
    model.register_buffer("queue", torch.zeros(3))
    assert [id(buffer) for buffer in buffers_of_steps(model)] == [id(model.queue), id(model[2].own)]


class Recording(Processes):
    """One process that keeps what it shares, and puts in place what the main process would have."""

    def __init__(self):
        self.shared = []

    def share_buffers(self, buffers):
        buffers = list(buffers)
        self.shared.append(len(buffers))
        for buffer in buffers:
            buffer.fill_(7)


def test_buffers_are_shared_before_each_evaluation_and_in_steps_only_if_steps_read_them(cache):
    dataset, device = CachedDataset(cache), CpuDevice()
    device.processes = Recording()
    settings = TrainSettings(model="tiny_models:tiny", batch_size=20, lr=0.1, ema=0.9)
    learner = Learner(settings, dataset, make_task("classes", len(dataset.classes)), device)
    images = torch.stack([dataset[row][0].permute(1, 2, 0) for row in range(20)])
    batch = DeviceBatch({"image": images}, torch.as_tensor(dataset.labels[:20]))
    for number in range(3):
        learner.step([batch], Rates(0.1, 0.9), number)
    assert device.processes.shared == [0, 0, 0]  # none of its buffers
    compile_evaluation(learner, dataset)
    assert device.processes.shared[3:] == [3]
    assert learner.ema is not None
    assert learner.ema.state_dict()["average"]["1.running_mean"].tolist() == [7] * 4  # what is evaluated


def test_a_parameter_without_a_gradient_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError, match=r"'1\.weight' got no gradient.*--freeze 1\.weight"):
        process(0).check_gradients(model)
    model[1].requires_grad_(False)
    process(0).check_gradients(model)
