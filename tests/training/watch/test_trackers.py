"""Weights & Biases and MLflow are called as their own documentation says; stand-ins record the calls."""

from __future__ import annotations

import json
import re
import sys
import types
import warnings

import pytest

from tpucache import CachedDataset, DependencyError, TrainingError, UnfinishedError
from tpucache.cli import main
from tpucache.training.device import CpuDevice
from tpucache.training.loop import train
from tpucache.training.run_options import RunOptions
from tpucache.training.settings import TrainSettings
from tpucache.training.watch.trackers import IDS_NAME, watch_with

SETTINGS = TrainSettings(model="cnn", epochs=2, batch_size=16, lr=0.02)


class Wandb(types.ModuleType):
    """As https://docs.wandb.ai/ref/python/: `init` gives a run with `id`, `define_metric`, `log` and `finish`."""

    def __init__(self):
        super().__init__("wandb")
        self.inits, self.rows, self.ends, self.fails = [], [], [], False

    def init(self, *, dir, name, id, resume, config):
        self.inits.append({"dir": dir, "name": name, "id": id, "resume": resume, "config": config})
        return types.SimpleNamespace(
            id=id or "abc123",
            define_metric=self.define_metric,
            log=self.log,
            finish=self.finish,
        )

    def finish(self, *, exit_code):
        self.ends.append(exit_code)

    def define_metric(self, name, *, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, data):
        if self.fails:
            raise RuntimeError("the network is gone")
        self.rows.append(data)


class Mlflow(types.ModuleType):
    """As https://mlflow.org/docs/latest/python_api/: `start_run`, `end_run`, and a client's `log_batch`."""

    def __init__(self):
        super().__init__("mlflow")
        self.starts, self.metrics, self.params, self.ends = [], [], {}, []
        self.tracking = types.SimpleNamespace(MlflowClient=lambda: types.SimpleNamespace(log_batch=self.log_batch))
        self.entities = types.SimpleNamespace(
            Metric=lambda key, value, timestamp, step: (key, value, step), Param=lambda key, value: (key, value)
        )

    def start_run(self, *, run_id, run_name):
        self.starts.append((run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "f" * 32))

    def log_batch(self, run_id, metrics=(), params=()):
        assert run_id == "f" * 32
        assert len(metrics) <= 1000
        assert len(params) <= 100
        self.metrics += metrics
        self.params.update(params)

    def end_run(self, status):
        self.ends.append(status)


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    return sys.modules["wandb"]


@pytest.fixture
def mlflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", Mlflow())
    return sys.modules["mlflow"]


@pytest.mark.slow
def test_a_run_of_the_command_is_watched_by_both_and_continued_there(cache, tmp_path, wandb, mlflow):
    run = tmp_path / "mine"
    words = ["train", cache, "--run", run, "--backend", "torch", "--model", "cnn", "--valid", 0.2, "--batch-size", 16]
    words += ["--lr", 0.02, "--watch-with", "wandb", "--watch-with", "mlflow", "--json", "--epochs", 2]
    assert main([str(word) for word in words]) == 0
    report = json.loads((run / "report.json").read_text())
    losses = [(row["step"], row["train/loss"]) for row in wandb.rows if "train/loss" in row]
    assert losses == [*enumerate(report["losses"], 1)]
    assert [(step, value) for key, value, step in mlflow.metrics if key == "train/loss"] == losses
    accuracies = [(row["step"], row["valid_accuracy"]) for row in report["epochs"]]
    assert [(row["step"], row["valid/accuracy"]) for row in wandb.rows if "valid/accuracy" in row] == accuracies
    assert [(step, value) for key, value, step in mlflow.metrics if key == "valid/accuracy"] == accuracies
    assert wandb.inits[0]["config"]["batch_size"] == 16
    assert mlflow.params["batch_size"] == "16"
    assert (wandb.inits[0]["name"], wandb.inits[0]["id"], mlflow.starts) == ("mine", None, [(None, "mine")])
    assert (wandb.ends, mlflow.ends) == ([0], ["FINISHED"])
    with watch_with(["wandb", "mlflow"], {"batch_size": 16}, run) as watchers:
        for watcher in watchers:
            watcher.losses(14, [0.5])
    assert (wandb.inits[1]["id"], wandb.inits[1]["resume"], mlflow.starts[1]) == ("abc123", "allow", ("f" * 32, None))


def test_a_run_that_is_refused_leaves_nothing_there(tmp_path, wandb, mlflow):
    with watch_with(["wandb", "mlflow"], {}, tmp_path / "run"):
        pass
    assert wandb.inits == mlflow.starts == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [(UnfinishedError("a limit"), 0, "KILLED"), (KeyboardInterrupt(), 0, "KILLED"), (TrainingError("no"), 1, "FAILED")],
)
def test_how_a_run_ended_is_said_there(tmp_path, wandb, mlflow, error, code, status):
    def fail():
        with watch_with(["wandb", "mlflow"], {}, tmp_path) as watchers:
            for watcher in watchers:
                watcher.losses(0, [1.0, 2.0])
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (wandb.ends, mlflow.ends) == ([code], [status])


@pytest.mark.slow
def test_a_service_that_fails_does_not_end_the_run(cache, tmp_path, wandb):
    wandb.fails = True
    with watch_with(["wandb"], {}, tmp_path) as watchers, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = RunOptions(replay=False, watchers=watchers)
        report = train(tmp_path / "run", SETTINGS, CachedDataset(cache), None, CpuDevice(), options)
    assert "wandb failed, and no longer watches this run: the network is gone" in str(caught[0].message)
    assert len(report.epochs) == 2
    assert len(caught) == 1
    assert wandb.ends == []


def test_a_service_that_cannot_begin_ends_the_run_with_advice(tmp_path, wandb, monkeypatch):
    def refuse(**_):
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(wandb, "init", refuse)
    message = "api_key not configured. Leave --watch-with wandb out"
    with watch_with(["wandb"], {}, tmp_path) as (watcher,), pytest.raises(TrainingError, match=re.escape(message)):
        watcher.losses(0, [1.0])


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DependencyError, match=f"pip install {name}"), watch_with([name], {}, tmp_path):
        pass


@pytest.mark.parametrize("text", ["[]", '{"wandb": "../x"}', '{"wandb": 3}', "{", '{"wandb": "a", "wandb": "b"}'])
def test_ids_that_are_none_are_refused(tmp_path, wandb, text):
    (tmp_path / IDS_NAME).write_text(text)
    with watch_with(["wandb"], {}, tmp_path) as (watcher,), pytest.raises(TrainingError, match=IDS_NAME):
        watcher.losses(0, [1.0])
    assert wandb.inits == []
