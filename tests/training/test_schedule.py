"""Rates by the step: one cycle as torch has it, the others by their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpucache.training.schedule import (
    SCHEDULES,
    Rates,
    constant,
    make_schedule,
    one_cycle,
    warmup_cosine,
)


@pytest.mark.slow
@settings(max_examples=25)
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


def near(rates):
    return Rates(*(rate * (1 - 2**-22) for rate in rates))


@pytest.mark.slow
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 200),
    st.one_of(st.sampled_from([1.0, 25.0]), st.floats(1e-5, 3.0)),
)
def test_no_schedule_has_a_rate_of_zero_or_one_or_another_number_of_a_step(name, steps, lr):
    schedule = make_schedule(name, steps, lr)
    rates = [schedule(step) for step in range(steps)]
    assert all(0 < rate.lr <= lr and np.float32(rate.lr) not in (0, 1, np.float32(lr)) for rate in rates)
    assert all(0 < rate.momentum < 1 for rate in rates)
    # 1 - 0.1 and 1 - 0.05 of label smoothing
    assert not {np.float32(rate.momentum) for rate in rates} & {np.float32(0.9), np.float32(0.95)}


def test_warmup_cosine_rises_straight_and_falls_by_half_a_cosine():
    rates = [warmup_cosine(step, 101, 0.8, ramp=0.1).lr for step in range(101)]
    assert rates[:10] == pytest.approx([0.8 * (step + 1) / 11 for step in range(10)])
    assert rates[10] == pytest.approx(0.8)
    low = 0.8 / 1e4
    for step in range(10, 101):
        expected = low + (0.8 - low) * (1 + math.cos(math.pi * (step - 10) / 90)) / 2
        assert rates[step] == pytest.approx(expected)
    assert rates[-1] == pytest.approx(low)


def test_constant_is_constant():
    assert constant(0.3) == near(Rates(0.3, 0.9))


def test_a_schedule_is_named():
    assert make_schedule("one-cycle", 40, 0.2)(7) == one_cycle(7, 40, 0.2)
    assert make_schedule("warmup-cosine", 40, 0.2)(7) == warmup_cosine(7, 40, 0.2)
    assert make_schedule("constant", 40, 0.2)(7) == constant(0.2)
