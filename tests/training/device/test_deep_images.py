"""Images of 16 bits train with augmentation on the device, and with the same losses on every backend."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from tpucache.recipe import Recipe
from tpucache.warmup.build import build_cache

pytestmark = pytest.mark.slow

BACKENDS = {"eager": ("eager", 1), "one": ("xla", 1), "eight": ("xla", 8)}


@pytest.fixture(scope="module")
def x_rays(tmp_path_factory):
    """Grey images of 16 bits in two classes, one brighter than the other, as they are."""
    folder = tmp_path_factory.mktemp("x-rays")
    rng = np.random.default_rng(0)
    for number in range(32):
        pixels = rng.integers(0, 40000, (16, 16)) + 20000 * (number % 2)
        path = folder / "source" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint16)).save(path)
    build_cache(folder / "source", folder / "cache", Recipe(size=16, mode="keep"), jobs=1)
    return folder / "cache"


@pytest.mark.thorough
@pytest.mark.xla
def test_losses_on_one_and_eight_cores_are_those_of_plain_torch(x_rays, python, tmp_path):
    def train(name):
        backend, cores = BACKENDS[name]
        done = python(
            "-m", "tpucache", "train", x_rays, "--run", tmp_path / name, "--backend", backend, "--cores", cores,
            "--model", "tiny_models:tiny_grey", "--epochs", 3, "--batch-size", 16, "--valid", x_rays, "--lr", "0.02",
            "--flip", "--augment", "rotate,shift=2,brightness=0.1,contrast=0.2,erase=0.3",
            "--mixup", "0.3",
            devices=cores,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / name / "report.json").read_text())
        return report["losses"], [epoch["valid_loss"] for epoch in report["epochs"]]

    with ThreadPoolExecutor(2) as threads:
        expected, *others = threads.map(train, BACKENDS)
    assert len(expected[0]) == 6
    for losses, valid in others:
        assert losses == pytest.approx(expected[0], abs=1e-4)
        assert valid == pytest.approx(expected[1], abs=1e-3)
