"""Training in several processes, which torchrun starts, is training in one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from ranks import COMMON, NORMS, SETTINGS, TRAIN, VALID, learn
from running import last_of
from torch.distributed import TCPStore

from tpucache import CachedDataset
from tpucache.loading.order import full_order
from tpucache.training.data import choose_task
from tpucache.training.device import CpuDevice
from tpucache.training.evaluation import evaluate
from tpucache.training.learner import Learner
from tpucache.training.run.saved import load_last

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
def together(torch_forks):
    """The function `together(count, what, *arguments)`: what processes did that meet as those of torchrun do.

    They are forks of a process that has torch: those that torchrun starts import it, for seconds each.
    """
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(count, *words):
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        shared = {
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_RUN_ID": "together", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path,
        }  # fmt: skip

        def start(rank):
            more = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return torch_forks.run([str(HERE / "ranks.py"), *map(str, words)], {**os.environ, **shared, **more})

        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(start, range(count)))

    return run


@pytest.fixture(scope="module")
def two(cache, together, tmp_path_factory):
    """What each of two processes said and what they did, and where. The second one is killed at the end."""
    folder = tmp_path_factory.mktemp("two")
    done = together(2, "two", cache, folder)
    assert [each.returncode for each in done] == [0, -signal.SIGKILL], done[0].stderr
    return done, results_of(folder, 2), folder


@pytest.fixture(scope="module")
def four(cache, two, together, tmp_path_factory):
    """What each of four processes did, which continue a run of two."""
    folder = tmp_path_factory.mktemp("four")
    shutil.copytree(two[2] / "killed", folder / "killed")
    for done in together(4, "four", cache, folder):
        assert done.returncode == 0, done.stderr
    return results_of(folder, 4)


def assert_alike(report, expected):
    assert len(report["losses"]) == 21
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
    assert first["pace"]["steps"] == 19
    assert first["pace"]["ceiling_idle"] is not None
    # Of both processes; up to three batches were sent before the pace was measured.
    assert first["pace"]["received_bytes"] > 16 * 16 * 16 * 16 * 3


def test_a_loss_that_is_not_finite_ends_all_processes_at_the_same_step(two):
    first, second = (results["diverged"] for results in two[1])
    assert "not finite" in first or "the loss is" in first
    assert first == second


def test_what_the_main_process_cannot_save_ends_all_processes_at_the_same_step(two):
    assert [each["unsaved"] for each in two[1]] == ["not to be saved"] * 2


def test_a_signal_to_one_process_stops_all_after_the_same_step(two):
    done, results, folder = two
    assert [each["stopped"] for each in results] == [3, 3]
    report = json.loads(done[0].stdout)
    assert done[1].stdout == ""
    assert not report["finished"]
    assert len(report["losses"]) == 6
    assert last_of(folder / "stopped")["stand"]["steps"] == 6
    assert all(each.stderr.count("interrupted after step 6 of") == 1 for each in done)


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
    results = two[1]
    assert "another process of the run has ended" in results[0]["lost"]
    assert "lost" not in results[1]


@pytest.mark.thorough
def test_processes_that_torchrun_starts_do_the_same(cache, two, torch_forks, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = torch_forks.run([*torchrun, str(HERE / "ranks.py"), "two", str(cache), str(tmp_path)], environment)
    assert done.returncode == 1  # of the process that is killed
    assert json.loads(done.stdout)["losses"] == json.loads(two[0][0].stdout)["losses"]  # the main process's alone
    assert done.stderr.count("interrupted after step 6 of") == 2
    for found, expected in zip(results_of(tmp_path, 2), two[1], strict=True):
        assert found["sgd"]["losses"] == expected["sgd"]["losses"]
        assert ("lost" in found) == ("lost" in expected)


@pytest.mark.thorough
def test_a_run_is_continued_by_another_number_of_processes_with_the_samples_that_remain(one, two, four):
    for each in four:
        assert_alike(each["resumed"], one["adamw"])
    saved = last_of(two[2] / "killed")["stand"]["steps"]
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
    assert "start the command without torchrun" in done.stderr
