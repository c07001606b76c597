"""The report says what the run did, also when it stopped, and is not lost when the command is repeated."""

from __future__ import annotations

import json
import signal

import pytest
from running import command, report_of, train_on

from tpucache import CachedDataset, TrainingError
from tpucache.training.settings import TrainSettings

pytestmark = pytest.mark.slow

COMMAND = "--backend eager --model tiny_models:tiny --epochs 1 --valid 0.2 --batch-size 48"  # two steps

#: A loss that sends a signal when it is first called.
LOSS = """
import os
from torch.nn.functional import cross_entropy as loss_of

SIGNALS = [{number:d}]

def loss(outputs, labels):
    if SIGNALS:
        os.kill(os.getpid(), SIGNALS.pop())
    return loss_of(outputs, labels)
"""


def train(cache, run, *more):
    return command("train", cache, "--run", run, *COMMAND.split(), *more)


def contents(run):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()}


def test_the_command_of_a_finished_run_changes_nothing_and_says_so(cache, tmp_path, capsys, caplog):
    run = tmp_path / "run"
    assert train(cache, run, "--batch-size", 16, "--resume", "--json") == 0
    first, before = json.loads(capsys.readouterr().out), contents(run)
    assert first["finished"]
    assert first["pace"]["steps"] > 0
    assert train(cache, run, "--batch-size", 16, "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out) == first
    assert f"{run} holds a finished run" in caplog.text
    assert train(cache, run, "--batch-size", 16) == 2
    assert contents(run) == before


def test_a_report_that_was_not_written_is_written_when_the_command_is_repeated(cache, tmp_path):
    run = tmp_path / "run"
    assert train(cache, run) == 0
    before = report_of(run)
    (run / "report.json").unlink()
    assert train(cache, run, "--resume") == 0
    after = report_of(run)
    assert [after[name] for name in ("finished", "losses", "epochs")] == [
        before[name] for name in ("finished", "losses", "epochs")
    ]


def test_a_report_that_cannot_be_read_is_named(cache, tmp_path):
    settings, dataset = TrainSettings(model="tiny_models:tiny", epochs=1, batch_size=50), CachedDataset(cache)
    train_on(tmp_path, settings, dataset)
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(TrainingError, match=r"report\.json"):
        train_on(tmp_path, settings, dataset, resume=True)


@pytest.mark.parametrize("json_wanted", [True, False])
def test_a_time_limit_leaves_an_unfinished_report_and_status_three(cache, tmp_path, capsys, json_wanted):
    run = tmp_path / "run"
    assert train(cache, run, "--time-limit", "0", *(["--json"] if json_wanted else [])) == 3
    out, err = capsys.readouterr()
    assert "--resume" in err.splitlines()[-1]
    report = report_of(run)
    assert report["finished"] is False
    assert report["steps"] == 2
    assert len(report["losses"]) == 1
    assert (json.loads(out) == report) if json_wanted else out == ""
    assert train(cache, run, "--resume") == 0
    assert report_of(run)["finished"] is True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_an_unfinished_report_and_status_three(cache, tmp_path, monkeypatch, number):
    (tmp_path / f"signal_{number}.py").write_text(LOSS.format(number=number))
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert train(cache, tmp_path / "run", "--loss", f"signal_{number}:loss") == 3
    finally:
        signal.signal(signal.SIGTERM, before)
    assert report_of(tmp_path / "run")["finished"] is False


def test_a_time_limit_is_obeyed_in_the_range_test(cache, tmp_path, capsys):
    run, options = tmp_path / "run", ("--lr", "find")
    assert train(cache, run, *options, "--time-limit", "0") == 3
    message = capsys.readouterr().err.splitlines()[-1]
    assert "in the range test" in message
    assert report_of(run)["finished"] is False
    assert report_of(run)["losses"] == []
    assert not (run / "last.pt").exists()
    assert train(cache, run, *options, "--resume") == 0
    assert report_of(run)["finished"] is True


@pytest.mark.parametrize(
    ("batch", "executions", "dropped", "by_execution", "text"),
    [
        (30, 1, 0, 0, None),
        (16, 1, 6, 0, "6 of 150 samples an epoch, different samples each time: 6 that do not fill a batch"),
        (16, 4, 22, 16, "22 of 150 samples an epoch, different samples each time: 6 that do not fill a batch, 16 by"),
        (30, 3, 60, 60, "60 by --steps-per-execution"),
    ],
)
def test_samples_that_every_epoch_drops_are_reported(cache, tmp_path, batch, executions, dropped, by_execution, text):
    settings = TrainSettings(
        model="tiny_models:tiny", epochs=1, batch_size=batch, steps_per_execution=executions, lr=0.01
    )
    report = train_on(tmp_path, settings, CachedDataset(cache))
    assert len(report.losses) * batch == 150 - dropped
    values = report_of(tmp_path)
    assert (values["samples"], values["dropped_samples"], values["dropped_by_execution"]) == (
        150, dropped, by_execution
    )  # fmt: skip
    lines = [line for line in report.lines() if line.startswith("dropped")]
    assert text in lines[0] if text else lines == []
