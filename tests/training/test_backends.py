"""The same run on plain torch, on one XLA device and on eight."""

from __future__ import annotations

import json

import pytest
import torch

BACKENDS = {"eager": ("eager", 1), "one": ("xla", 1), "eight": ("xla", 8)}


@pytest.fixture(scope="module")
def runs(cache, python, tmp_path_factory):
    """Twenty-one steps and three evaluations on each backend: the report and the weights."""
    found = {}
    for name, (backend, cores) in BACKENDS.items():
        run = tmp_path_factory.mktemp(name)
        done = python(
            "-m", "tpucache", "train", cache, "--run", run, "--backend", backend, "--cores", cores,
            "--model", "tiny_models:tiny", "--epochs", 3, "--batch-size", 16, "--lr", 0.02, "--valid", 0.2,
            devices=cores,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        report = json.loads((run / "report.json").read_text())
        found[name] = report, torch.load(run / "last.pt", weights_only=True)
    return found


@pytest.mark.parametrize("name", ["one", "eight"])
def test_losses_are_those_of_plain_torch(runs, name):
    expected, losses = runs["eager"][0]["losses"], runs[name][0]["losses"]
    assert len(losses) == len(expected) >= 20
    assert losses == pytest.approx(expected, abs=1e-4)
    assert abs(losses[-1] - losses[0]) > 1e-3


@pytest.mark.parametrize("name", ["one", "eight"])
def test_weights_are_those_of_plain_torch(runs, name):
    expected, weights = runs["eager"][1]["model"], runs[name][1]["model"]
    for key, value in expected.items():
        assert weights[key].device.type == "cpu"
        # XLA's BatchNorm keeps the biased variance, torch the unbiased: n / (n - 1) of 16 images of 8x8 pixels.
        relative = 1 / (16 * 8 * 8 - 1) if key.endswith("running_var") else 0
        torch.testing.assert_close(weights[key], value, atol=1e-5, rtol=relative)


@pytest.mark.parametrize("name", ["one", "eight"])
def test_validation_metrics_are_those_of_plain_torch(runs, name):
    for expected, found in zip(runs["eager"][0]["validation"], runs[name][0]["validation"], strict=True):
        assert found["samples"] == expected["samples"] == 30
        assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-9)
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)


@pytest.mark.parametrize("name", ["one", "eight"])
def test_nothing_compiles_after_the_second_step(runs, name):
    assert runs[name][0]["pace"]["compiles"] == 0
    assert runs[name][0]["pace"]["steps"] == len(runs[name][0]["losses"]) - 2


FAILING = """
import sys
from tpucache import CachedDataset, DamageError
from tpucache.cli import main

read_into = CachedDataset.read_into
calls = []

def fail_later(self, *arguments):
    calls.append(1)
    if len(calls) > 6:
        raise DamageError("Shard v01-00000.lmdb fell off the shelf")
    return read_into(self, *arguments)

CachedDataset.read_into = fail_later
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("backend", "cores"), BACKENDS.values())
def test_data_that_fails_in_mid_epoch_ends_training_with_its_error(cache, python, tmp_path, backend, cores):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = python(
        script, "train", cache, "--run", tmp_path / "run", "--backend", backend, "--cores", cores,
        "--model", "tiny_models:tiny", "--epochs", 2, "--batch-size", 8,
        devices=cores,
    )  # fmt: skip
    assert done.returncode == 1
    assert "fell off the shelf" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "last.pt").exists()


def test_cores_that_are_neither_one_nor_all_are_refused(cache, python, tmp_path):
    done = python("-m", "tpucache", "train", cache, "--run", tmp_path, "--cores", 4, "--batch-size", 8, devices=8)
    assert done.returncode == 2
    assert "8" in done.stderr
    assert "Traceback" not in done.stderr
