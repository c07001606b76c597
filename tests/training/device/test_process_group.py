"""What the processes of a group exchange in each step, with a stand-in for torch's exchange between them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tpucache import UsageError
from tpucache.training.device import Processes, process_group
from tpucache.training.device.process_group import ProcessGroup
from tpucache.training.interrupt import Stopped, StopRequest


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


def test_a_parameter_without_a_gradient_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError, match=r"'1\.weight' got no gradient.*--freeze 1\.weight"):
        process(0).check_gradients(model)
    model[1].requires_grad_(False)
    process(0).check_gradients(model)
