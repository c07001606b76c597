"""`--processes N` is one command: N processes do what one does, are stopped and continued, and fail in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from running import command, report_of, rows_of, with_folds

from tpucache import TrainingError, UnfinishedError, UsageError, process
from tpucache.training.device import launch

HERE = Path(__file__).parents[1]
TRAIN = (
    "--backend", "torch", "--device", "cpu", "--model", "tiny_models:layer_norm", "--epochs", "2", "--batch-size", "16",
    "--lr", "0.05", "--flip", "--mixup", "0.3", "--folds", "--json", "--metric", "tiny_metrics:signalling",
)  # fmt: skip
TRUST = ("--trust", "tiny_models:layer_norm")


def complaints(done):
    return [line for line in done.stderr.splitlines() if line.startswith("python -m tpucache")]


@pytest.fixture(scope="module")
def folded(cache, tmp_path_factory):
    """A cache in two folds."""
    return with_folds(cache, tmp_path_factory.mktemp("folded"), ["0", "1"])


@pytest.fixture(scope="module")
def run(torch_forks):
    """The function `run(*arguments)`: what a command does, in a fork of a process that has torch.

    The processes that it starts are no forks.
    """
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*arguments, **more):
        words = ["-m", "tpucache", *map(str, arguments)]
        return torch_forks.run(words, {**os.environ, "PYTHONPATH": path, **more})

    return run


@pytest.fixture(scope="module")
def stopped(folded, run, tmp_path_factory):
    """A folder, in which a signal stops a run of all folds by two processes, and what the run says."""
    folder = tmp_path_factory.mktemp("runs")
    words = ("train", folded, "--run-dir", folder / "two", *TRAIN, "--processes", "2")
    return folder, run(*words, SIGNAL_PARENT="yes")


@pytest.fixture(scope="module")
def runs(folded, run, stopped):
    """A run of all folds in this process, and that of two processes, which the same command continues; both predict."""
    folder, _ = stopped
    assert command("train", folded, "--run", folder / "one", *TRAIN) == 0
    words = ("predict", folder / "one", folded, "--backend", "torch", *TRUST, "-o")
    assert command(*words, folder / "one.csv") == 0
    finished = run("train", folded, "--run-dir", folder / "two", *TRAIN, "--processes", "2", "--resume")
    return folder, finished, run(*words, folder / "two.csv", "--processes", "2", "--batch-size", "6", "--json")


def assert_alike(table, expected):
    rows, known = rows_of(table), rows_of(expected)
    assert [*rows[0]] == [*known[0]]
    names = ("sample", "path", "label")
    assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in known]
    values, wanted = ([[float(value) for value in [*row.values()][4:]] for row in each] for each in (rows, known))
    np.testing.assert_allclose(values, wanted, atol=1e-5)


@pytest.mark.slow
def test_a_signal_stops_all_processes_with_one_line_and_the_report(stopped):
    _, done = stopped
    assert done.returncode == 3, done.stderr
    (line,) = complaints(done)
    assert "interrupted" in line
    assert "--resume" in line
    assert not json.loads(done.stdout)["finished"]


@pytest.mark.slow
@pytest.mark.thorough
def test_folds_in_two_processes_stopped_and_continued_are_those_of_one(runs):
    folder, finished, _ = runs
    assert finished.returncode == 0, finished.stderr
    report, expected = json.loads(finished.stdout), report_of(folder / "one")
    assert report["out_of_fold"] == pytest.approx(expected["out_of_fold"], abs=1e-5)
    for name in ("fold-0", "fold-1"):
        found, known = (report_of(folder / each / name) for each in ("two", "one"))
        assert found["processes"] == 2
        np.testing.assert_allclose(found["losses"], known["losses"], atol=1e-5)
    assert_alike(folder / "two" / "out_of_fold.csv", folder / "one" / "out_of_fold.csv")


@pytest.mark.slow
@pytest.mark.thorough
def test_predictions_of_two_processes_are_those_of_one(runs):
    folder, _, predicted = runs
    assert predicted.returncode == 0, predicted.stderr
    assert json.loads(predicted.stdout)["samples"] == 150
    assert_alike(folder / "two.csv", folder / "one.csv")


@pytest.mark.parametrize(
    ("ended", "statuses", "kind", "words"),
    [
        *(
            ([(0, 1, "another process of the run has ended"), (1, status, "why")], {0: 1, 1: status}, kind, "^why$")
            for status, kind in ((1, TrainingError), (2, UsageError), (3, UnfinishedError))
        ),
        ([(0, 1, "another process")], {0: 1, 1: -9}, TrainingError, "process 1 of 2 was ended by SIGKILL"),
        ([], {0: 4}, TrainingError, "process 0 of 2 ended with status 4"),
    ],
)
def test_the_error_is_that_of_the_process_that_failed_first_or_says_which_was_killed(
    tmp_path, ended, statuses, kind, words
):
    for rank, status, message in ended:
        text = json.dumps({"status": status, "message": message, "time": -rank})
        (tmp_path / process.END_PATTERN.replace("*", str(rank))).write_text(text)
    with pytest.raises(kind, match=words):
        launch.raise_first(tmp_path, statuses, 2)
    launch.raise_first(tmp_path / "empty", {}, 2)


def test_processes_are_of_the_backend_torch_and_not_of_torchrun(cache, tmp_path, monkeypatch, capsys):
    words = ("train", cache, "--run", tmp_path / "run", "--processes", "2", "--backend")
    assert command(*words, "xla") == 2
    assert "--processes is for the backend torch" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command(*words, "torch") == 2
    assert "leave --processes out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_torchrun_takes_no_option_of_train_for_its_own():
    from torch.distributed.run import get_args_parser

    from tpucache.cli import make_parser

    names = [name for action in make_parser().commands["train"].actions for name in action.option_strings]
    given = [name for name in names if name.startswith("--") and name != "--run"]
    assert "--run-dir" in given
    parsed = get_args_parser().parse_args(["--nproc-per-node", "2", "-m", "tpucache", "train", "cache", *given])
    assert parsed.training_script_args == ["train", "cache", *given]


def test_one_process_of_several_leaves_its_complaint_to_the_command(tmp_path, monkeypatch, capsys):
    shared = {"folder": str(tmp_path), "began": 1.0, "parent": os.getppid()}
    monkeypatch.setenv(process.LAUNCHED, json.dumps(shared))
    monkeypatch.setenv("RANK", "3")
    assert process.complain("it  failed", 2) == 2
    assert capsys.readouterr().err == ""
    assert json.loads((tmp_path / "3.end.json").read_text())["message"] == "it failed"
    monkeypatch.setenv(process.LAUNCHED, json.dumps({**shared, "parent": -1}))  # that of another command
    assert process.complain("it failed", 2) == 2
    assert "it failed" in capsys.readouterr().err
