"""What a run has done so far, and when it stops."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import tiny_metrics
from running import report_of, train_on
from stopping import Killed, Moment, differences, results, run_once, stop_once
from thorough import thorough

from tpucache import CachedDataset
from tpucache.training.device import CpuDevice
from tpucache.training.run.state import RunState, make_plan
from tpucache.training.settings import TrainSettings

SETTINGS = TrainSettings(model="tiny_models:tiny", epochs=4, batch_size=50)


def best_epoch(cache, run, values):
    """Train with these accuracies; return after which epoch best.pt was written last."""
    tiny_metrics.STEPS[:], files = values, []

    class Recorder:
        def losses(self, first, values):
            """Nothing of them is recorded."""

        def epoch(self, row):
            files.append((run / "best.pt").read_bytes())

    dataset = CachedDataset(cache)
    settings = replace(SETTINGS, metric=("tiny_metrics:scripted",), watch="scripted")
    train_on(run, settings, dataset, dataset, watchers=[Recorder()])
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
def test_nan_is_never_the_best_and_the_next_number_replaces_it(cache, tmp_path, values, expected):
    assert best_epoch(cache, tmp_path, values) == expected


def test_a_run_is_finished_when_its_last_epoch_is_evaluated():
    plan = make_plan(SETTINGS, 150)
    assert plan.steps == 12
    assert not plan.awaits_evaluation(RunState())
    assert plan.awaits_evaluation(RunState(3))
    assert not plan.awaits_evaluation(RunState(3, rows=[{"step": 3}]))
    assert not plan.awaits_evaluation(RunState(4, rows=[]))  # an epoch whose row was lost can no longer be evaluated
    assert not plan.is_finished(RunState(12, rows=[{"step": 9}]))
    assert plan.is_finished(RunState(12, rows=[{"step": 12}]))


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory):
    """An uninterrupted run: what it leaves, and how many batches its device ran."""
    run, device = tmp_path_factory.mktemp("whole"), CpuDevice()
    moment = Moment(device)
    run_once(cache, run, device)
    return results(run), moment.count


@pytest.mark.parametrize(
    ("kind", "every"), [("SIGKILL", 3), *thorough(("time limit", 1), ("SIGTERM", 1), ("SIGKILL", 1))]
)
def test_a_run_stopped_at_any_step_or_evaluation_batch_resumes_to_the_same_results(cache, tmp_path, whole, kind, every):
    expected, batches = whole
    assert batches >= 4 + 2 * 2
    stops = 0
    chosen_ones = range(1, batches + 1, every)
    for chosen in chosen_ones:
        run = tmp_path / str(chosen)
        if stop_once(cache, run, CpuDevice(), kind, chosen):
            stops += 1
            if kind != "SIGKILL":
                assert report_of(run)["finished"] is False
            run_once(cache, run, CpuDevice())
        assert report_of(run)["finished"] is True
        assert differences(results(run), expected) == [], chosen
    assert stops >= len(chosen_ones) - 2  # after the last evaluation nothing is left to stop


@pytest.mark.thorough
def test_a_run_killed_between_any_two_writes_resumes_to_the_same_results(cache, tmp_path, whole, monkeypatch):
    fsync = os.fsync
    writes, chosen = 0, 0

    def counted(descriptor):
        nonlocal writes
        writes += 1
        if writes == chosen:
            raise Killed
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    run_once(cache, tmp_path / "whole", CpuDevice())
    total = writes
    assert total >= 2 * 3  # the best weights, the state and the history, each file and its folder
    for chosen in range(1, total + 1):
        run, writes = tmp_path / str(chosen), 0
        with pytest.raises(Killed):
            run_once(cache, run, CpuDevice())
        writes = total
        run_once(cache, run, CpuDevice())
        assert differences(results(run), whole[0]) == [], chosen
        assert report_of(run)["finished"] is True


def test_what_a_killed_process_did_not_rename_is_removed(cache, tmp_path):
    (tmp_path / ".last.pt.77.tmp").write_bytes(b"half")
    run_once(cache, tmp_path, CpuDevice())
    files = {"best.pt", "history.csv", "last.pt", "report.json", "run.json", "validation.npz"}
    assert {path.name for path in tmp_path.iterdir()} == files


ON_XLA = """
import sys
from pathlib import Path
from stopping import Moment, differences, results, run_once, stop_once
from tpucache.training.device import open_device

cache, folder, device = Path(sys.argv[1]), Path(sys.argv[2]), open_device("xla", int(sys.argv[3]))
run_once(cache, folder / "whole", device)
expected = results(folder / "whole")
# One sample is evaluated first, and once more after two steps. So an epoch ends at 4 and 8, its evaluation at 6 and 10.
kinds = {"time limit": (4, 8), "SIGTERM": (5,), "SIGKILL": (7, 9)}
for kind, chosen in [(kind, int(number)) for number in sys.argv[4:] for kind in kinds if int(number) in kinds[kind]]:
    run = folder / f"{kind} {chosen}"
    assert stop_once(cache, run, device, kind, chosen)
    Moment(device)
    run_once(cache, run, device)
    assert differences(results(run), expected) == [], (kind, chosen)
"""


@pytest.mark.xla
@pytest.mark.parametrize(("cores", "moments"), [(1, [7]), *thorough((1, [4, 5, 8, 9]), (8, [4, 5, 7, 8, 9]))])
def test_a_run_stopped_on_xla_resumes_to_the_same_results(cache, on_xla, tmp_path, cores, moments):
    on_xla(ON_XLA, cache, tmp_path, cores, *moments, devices=cores)
