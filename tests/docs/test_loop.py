"""The loop in docs/loop.md runs unchanged, on plain torch and on XLA, and its watchers with stand-ins."""

from __future__ import annotations

import contextlib
import os
import sys
import types

import pytest
import torch
from pages import DOCS, blocks
from thorough import thorough

from tpucache.training import TrainSettings

CODE = [text for language, text in blocks(DOCS / "loop.md") if language == "python"]
PLAIN = "open_device()"


@pytest.mark.slow
@pytest.mark.parametrize("device", [PLAIN, *thorough(pytest.param('open_device("xla")', marks=pytest.mark.xla))])
def test_the_loop_of_the_page_trains(cache, tmp_path, device, xla_forks, xla_flags):
    code = CODE[0]
    assert PLAIN in code
    (tmp_path / "loop.py").write_text(code.replace(PLAIN, device))
    (tmp_path / "cache").mkdir()
    for name in ("train", "valid"):
        (tmp_path / "cache" / name).symlink_to(cache)
    done = xla_forks.run(["loop.py"], {**os.environ, "XLA_FLAGS": xla_flags, "PJRT_DEVICE": "CPU"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *epochs, accuracy = done.stdout.splitlines()
    assert len(epochs) == 5
    assert float(accuracy.split()[1]) > 0.6
    assert accuracy.endswith("of 150")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    assert all(tensor.device.type == "cpu" for tensor in weights.values())


@pytest.mark.slow
def test_the_watchers_of_the_page_send_losses_and_epochs(cache, tmp_path, monkeypatch):
    sent = {"wandb": [], "mlflow": []}
    run = types.SimpleNamespace(
        define_metric=lambda _name, step_metric: None,
        log=lambda values: sent["wandb"].append((values["step"], values)),
        finish=lambda: sent["wandb"].append("end"),
    )
    wandb, mlflow = types.ModuleType("wandb"), types.ModuleType("mlflow")
    wandb.init = lambda project: run
    mlflow.start_run = lambda run_name: contextlib.nullcontext()
    mlflow.log_metric = lambda name, value, step: sent["mlflow"].append((step, {name: value}))
    mlflow.log_metrics = lambda values, step: sent["mlflow"].append((step, values))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "train").symlink_to(cache)
    monkeypatch.chdir(tmp_path)
    for module, code in zip((wandb, mlflow), CODE[1:], strict=True):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        assert '"cnn", "cache/train", 0.2, ' in code
        exec(code.replace("0.2, ", "0.2, TrainSettings(epochs=2), "), {"TrainSettings": TrainSettings})
    assert sent["wandb"].pop() == "end"
    for rows in sent.values():
        steps = [step for step, values in rows if "loss" in values]
        assert steps == [*range(1, len(steps) + 1)]
        assert [step for step, values in rows if "valid_accuracy" in values][-1] == len(steps)
