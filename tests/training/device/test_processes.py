"""Training in several processes, which torchrun starts, is training in one."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import COMMON, NORMS, SETTINGS, TRAIN, VALID, learn
from torch.distributed import TCPStore

from tpucache import CachedDataset
from tpucache.loading.sampler import full_order
from tpucache.training.data import choose_task
from tpucache.training.device import CpuDevice
from tpucache.training.evaluation import evaluate
from tpucache.training.learn.learner import Learner
from tpucache.training.run.contents import load_last

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[1]


def results_of(folder, processes):
    """Return what each process has written."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def one(cache, tmp_path_factory):
    """The reports of this process alone."""
    return {name: learn(cache, tmp_path_factory.mktemp(name), settings) for name, settings in SETTINGS.items()}


@pytest.fixture(scope="module")
def two(cache, torch_forks, tmp_path_factory):
    """What two processes did, and where."""
    folder = tmp_path_factory.mktemp("two")
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = torch_forks.run(
        [*torchrun, str(HERE / "ranks.py"), "two", str(cache), str(folder)],
        {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    return done, results_of(folder, 2), folder


@pytest.fixture(scope="module")
def four(cache, two, python, tmp_path_factory):
    """What each of four processes did, which continue a run of two. They meet as those that torchrun starts do."""
    folder = tmp_path_factory.mktemp("four")
    shutil.copytree(two[2] / "killed", folder / "killed")
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "four", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip

    def start(rank):
        return python(HERE / "ranks.py", "four", cache, folder, **shared, RANK=rank, LOCAL_RANK=rank)

    with ThreadPoolExecutor(4) as threads:
        for done in threads.map(start, "0123"):
            assert done.returncode == 0, done.stderr
    return results_of(folder, 4)


def assert_alike(report, expected):
    assert len(report["losses"]) == 56
    np.testing.assert_allclose(report["losses"], expected["losses"], atol=1e-5)
    assert len(report["epochs"]) == COMMON["epochs"]
    for row, known in zip(report["epochs"], expected["epochs"], strict=True):
        assert row == pytest.approx(known, abs=1e-5)


@pytest.mark.parametrize("optimizer", SETTINGS)
def test_losses_and_metrics_in_two_processes_are_those_of_one(one, two, optimizer):
    for results in two[1]:
        assert_alike(results[optimizer], one[optimizer])


def test_every_process_has_the_report_of_all(two):
    first, second = (results["sgd"] for results in two[1])
    assert first == second
    assert first["processes"] == 2
    assert first["pace"]["steps"] == 54
    assert first["pace"]["ceiling_idle"] is not None
    assert first["pace"]["received_bytes"] > 54 * 16 * 16 * 16 * 3


def test_a_loss_that_is_not_finite_ends_all_processes_at_the_same_step(two):
    first, second = (results["diverged"] for results in two[1])
    assert "not finite" in first or "the loss is" in first
    assert first == second


def test_what_the_main_process_cannot_save_ends_all_processes_at_the_same_step(two):
    assert [each["unsaved"] for each in two[1]] == ["not to be saved"] * 2


def test_a_signal_to_one_process_stops_all_after_the_same_step(two):
    done, results, folder = two
    assert [each["stopped"] for each in results] == [3, 3]
    report = json.loads(done.stdout)  # the main process's, and nothing else
    assert not report["finished"]
    assert len(report["losses"]) == 6
    assert torch.load(folder / "stopped" / "last.pt", weights_only=True)["stand"]["steps"] == 6
    assert done.stderr.count("interrupted after step 6 of") == 2


def test_all_processes_evaluate_with_the_running_statistics_that_are_saved(cache, two):
    _, results, folder = two
    train_set, valid_set = CachedDataset(cache, "epoch").select(TRAIN), CachedDataset(cache).select(VALID)
    learner = Learner(NORMS, train_set, choose_task(NORMS, train_set), CpuDevice())
    learner.load_state_dict(load_last(folder / "norms")["learner"])
    expected = evaluate(learner, valid_set)
    for each in results:
        assert each["norms"]["epochs"][-1]["valid_loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_running_statistics_are_sent_before_evaluations_and_not_in_steps(two):
    for each in two[1]:
        # Before both epochs' evaluations and two that compile: means and variances of 4 channels, and a count.
        assert each["broadcasts"] == [8, 1] * 4
        assert len(each["norms"]["losses"]) == 2 * 7


def test_when_a_process_is_killed_all_end(two):
    done, results, _ = two
    assert done.returncode == 1
    assert "another process of the run has ended" in results[0]["lost"]
    assert "lost" not in results[1]


@pytest.mark.thorough
def test_a_run_is_continued_by_another_number_of_processes_with_the_samples_that_remain(one, two, four):
    for each in four:
        assert_alike(each["resumed"], one["adamw"])
    saved = torch.load(two[2] / "killed" / "last.pt", weights_only=True)["stand"]["steps"]
    epoch, step = divmod(saved, 7)
    assert (epoch, step) == (1, 2)
    read = [position for each in four for of, position in each["reads"] if of == epoch]
    seen, _, left_over = np.split(full_order(len(TRAIN), 0, epoch), [step * 16, 7 * 16])  # the last is read ahead
    assert sorted({*range(len(TRAIN))} - {*seen} - {*left_over}) == sorted(set(read) - {*left_over.tolist()})
    assert len(read) == len(set(read))


@pytest.mark.xla
def test_xla_is_refused_under_torchrun(cache, tmp_path, python):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "os.environ |= {'TORCHELASTIC_RUN_ID': 'none', 'WORLD_SIZE': '2'}\n"
        "from tpucache.cli import main\n"
        f"sys.exit(main(['train', {str(cache)!r}, '--run', {str(tmp_path / 'run')!r}, '--backend', 'xla']))\n"
    )
    done = python(script)
    assert done.returncode == 2
    assert "start it without torchrun" in done.stderr
