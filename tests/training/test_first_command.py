"""`train CACHE --run RUN` without an option: it trains on few samples, and on each kind of machine says its choice."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE
from PIL import Image
from running import report_of
from thorough import thorough

from tpucache import Recipe, build_cache
from tpucache.cli import main

_SIDE = 16


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Return a cache of this many photographs of two classes, one darker than the other; not to be written to."""
    folder = tmp_path_factory.mktemp("few")

    def build(count: int) -> Path:
        cache = folder / f"cache-{count}"
        if not cache.exists():
            rng = np.random.default_rng(count)
            for number in range(count):
                path = folder / f"photos-{count}" / ("dark", "light")[number % 2] / f"{number:03}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(0, 156, (_SIDE, _SIDE, 3)) + 100 * (number % 2)
                Image.fromarray(pixels.astype(np.uint8)).save(path)
            build_cache(folder / f"photos-{count}", cache, Recipe(size=_SIDE), jobs=1)
        return cache

    return build


@pytest.mark.parametrize(("count", "batch", "steps"), [(20, 8, 200), *thorough((40, 8, 500), (320, 8, 1000))])
def test_few_samples_train_without_an_option(few, tmp_path, monkeypatch, capsys, count, batch, steps):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")  # another machine may have a TPU
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", str(few(count)), "--run", str(tmp_path / "run"), "--model", "cnn"]) == 0  # in a moment
    said = capsys.readouterr()
    report = report_of(tmp_path / "run")
    reason = "PJRT_DEVICE is CPU" if importlib.util.find_spec("torch_xla") else "torch_xla is not installed"
    assert said.err.startswith(f"train: backend torch, as {reason}")
    assert f"batch      {batch}: default for {count} samples" in said.out
    assert report["finished"]
    assert len(report["losses"]) == steps
    assert all(map(math.isfinite, report["losses"]))
    if count == 320:
        assert np.mean(report["losses"][-20:]) < 0.5 * np.mean(report["losses"][:20])


def test_the_first_line_says_that_torch_is_loaded(tmp_path):
    """In a process of its own, as torch is loaded already in this one."""
    command = [sys.executable, "-m", "tpucache", "train", tmp_path / "missing", "--run", tmp_path / "run"]
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE)
    first, second = done.stderr.splitlines()
    assert first.startswith("train: backend torch, as ")
    assert first.endswith("; loading torch")
    assert "missing does not exist" in second


@pytest.mark.xla
@pytest.mark.slow
def test_xla_takes_all_cores_and_each_gets_as_many_samples(few, python, tmp_path):
    words = ["train", few(40), "--run", tmp_path / "run", "--backend", "xla", "--model", "tiny_models:tiny"]
    done = python("-m", "tpucache", *words, "--epochs", 2, devices=8)
    assert done.returncode == 0, done.stderr
    report = report_of(tmp_path / "run")
    assert (report["backend"], report["cores"], len(report["losses"])) == ("xla", 8, 2)
    assert "batch      40: default for 40 samples, 2 epochs on 8 cores" in done.stdout
