"""Which weights are the best, and what is left of a run."""

from __future__ import annotations

import math

import pytest
from thorough import thorough

from tpucache import CachedDataset
from tpucache.training.device import CpuDevice
from tpucache.training.learn.tasks.classes import Classes
from tpucache.training.loop import train
from tpucache.training.options import RunOptions
from tpucache.training.run.state import RunState, make_plan
from tpucache.training.settings import TrainSettings

SETTINGS = TrainSettings(model="tiny_models:tiny", epochs=4, batch_size=50)


def best_epoch(cache, run, monkeypatch, values):
    """Train with these accuracies; return after which epoch best.pt was written last."""
    left, files = iter(values), []

    class Recorder:
        def losses(self, first, values):
            """Nothing of them is recorded."""

        def epoch(self, row):
            files.append((run / "best.pt").read_bytes())

    monkeypatch.setattr(Classes, "metrics", lambda *_: {"accuracy": next(left)})
    dataset = CachedDataset(cache)
    train(run, SETTINGS, dataset, dataset, CpuDevice(), RunOptions(replay=False, watchers=[Recorder()]))
    assert len(files) == len(values)
    return files.index(files[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([math.nan, 0.2, 0.4, 0.3], 2),
        *thorough(([0.2, math.nan, 0.4, 0.3], 2)),
        ([0.5, math.nan, 0.4, math.nan], 0),
        *thorough(([math.nan, math.nan, math.nan, 0.1], 3)),
        ([math.nan] * 4, 3),
    ],
)
def test_nan_is_never_the_best_and_the_next_number_replaces_it(cache, tmp_path, monkeypatch, values, expected):
    assert best_epoch(cache, tmp_path, monkeypatch, values) == expected


def test_a_run_is_finished_when_its_last_epoch_is_evaluated():
    plan = make_plan(SETTINGS, 150)
    assert plan.steps == 12
    assert not plan.awaits_evaluation(RunState())
    assert plan.awaits_evaluation(RunState(3))
    assert not plan.awaits_evaluation(RunState(3, rows=[{"step": 3}]))
    assert not plan.awaits_evaluation(RunState(4, rows=[]))  # an epoch whose row was lost can no longer be evaluated
    assert not plan.is_finished(RunState(12, rows=[{"step": 9}]))
    assert plan.is_finished(RunState(12, rows=[{"step": 12}]))
