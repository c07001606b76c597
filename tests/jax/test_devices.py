"""Eight devices, and two processes of four, train as one device does, and see every sample once.

Two processes are what two hosts of a pod are; their mesh may also divide the model over them.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tpucache import CachedDataset

# Not imported here: in a process with JAX, every later fork warns.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")]

TRAIN = Path(__file__).with_name("train.py")
#: Runs it where torch is not installed.
WITHOUT_TORCH = """
import runpy, sys
for name in list(sys.modules):
    if name.split(".")[0] in ("torch", "tpucache"):
        del sys.modules[name]
sys.modules["torch"] = None  # None is what makes an import fail
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def found(run_with_jax, cache, port, tmp_path_factory):
    """What each process of each way of running wrote into its file; with torch installed on one device alone."""
    folder = tmp_path_factory.mktemp("found")
    two = [(2, 0, 4), (2, 1, 4)]
    ways = {"one": ([(1, 0, 1)], 1), "eight": ([(1, 0, 8)], 1), "two": (two, 1), "model": (two, 2)}
    alone = folder / "alone.py"
    alone.write_text(WITHOUT_TORCH)
    with ThreadPoolExecutor(6) as threads:
        running = {}
        for way, (processes, model) in ways.items():
            program, free = [TRAIN] if way == "one" else [alone, TRAIN], port()
            for count, process, devices in processes:
                words = [*program, cache, folder / f"{way}{process}.npz", count, process, free, model]
                running[way, process] = threads.submit(run_with_jax, *words, devices=devices)
    for key, program in running.items():
        done = program.result()
        assert done.returncode == 0, f"{key}: {done.stdout}{done.stderr}"
    return {key: dict(np.load(folder / f"{key[0]}{key[1]}.npz")) for key in running}


@pytest.mark.parametrize("key", [("eight", 0), ("two", 0), ("two", 1), ("model", 0), ("model", 1)])
def test_losses_are_those_of_one_device(found, key):
    expected = found["one", 0]["losses"]
    assert len(expected) == 50
    assert expected[-9:].mean() < 0.9 * expected[:9].mean()
    assert np.abs(found[key]["losses"] - expected).max() < 1e-5


@pytest.mark.parametrize("way", ["one", "eight", "two", "model"])
def test_every_sample_of_an_epoch_is_seen_exactly_once(found, cache, way):
    seen = np.concatenate([values["seen"] for (name, _), values in found.items() if name == way])
    dataset = CachedDataset(cache, variant="epoch")
    expected = [zlib.crc32(dataset[row][0].permute(1, 2, 0).numpy().tobytes()) for row in range(144)]
    assert sorted(seen.tolist()) == sorted(expected)


@pytest.mark.parametrize("way", ["one", "eight", "two", "model"])
def test_every_sample_is_evaluated_exactly_once_in_batches_of_one_shape(found, cache, way):
    rows = np.concatenate([values["evaluated"] for (name, _), values in found.items() if name == way])
    expected = [zlib.crc32(image.permute(1, 2, 0).numpy().tobytes()) for image, _ in CachedDataset(cache)]
    assert len(expected) % 16  # so that a batch is padded
    assert sorted(rows.tolist()) == sorted(expected)
