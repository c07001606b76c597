"""One cycle, as torch has it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache.training.schedule import one_cycle


@settings(deadline=None, max_examples=25)
@given(st.integers(4, 120), st.floats(1e-4, 2.0))
def test_rates_are_those_of_torchs_one_cycle(steps, peak):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps)
    for step in range(steps):
        rates = one_cycle(step, steps, peak)
        assert rates.lr == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        assert rates.momentum == pytest.approx(optimizer.param_groups[0]["momentum"], rel=1e-6)
        optimizer.step()
        if step < steps - 1:
            theirs.step()


def test_no_rate_is_ever_zero():
    assert all(one_cycle(step, 10, 0.1).lr > 0 for step in range(10))
