"""Eight devices, and two processes of four, train as one device does, and see every sample once.

Two processes are what two hosts of a pod are; their mesh may also divide the model over them.
"""

from __future__ import annotations

import functools
import zlib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from thorough import thorough

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
    """The function `found(way)`: what each process of a way of running wrote into its file.

    Torch is installed for one device alone.
    """
    folder, alone = tmp_path_factory.mktemp("found"), tmp_path_factory.mktemp("alone") / "alone.py"
    alone.write_text(WITHOUT_TORCH)
    two = [(2, 0, 4), (2, 1, 4)]
    ways = {"one": ([(1, 0, 1)], 1), "eight": ([(1, 0, 8)], 1), "two": (two, 1), "model": (two, 2)}

    def run(way):
        processes, model = ways[way]
        program, free = [TRAIN] if way == "one" else [alone, TRAIN], port()
        with ThreadPoolExecutor(2) as threads:
            running = []
            for count, process, devices in processes:
                words = [*program, cache, folder / f"{way}{process}.npz", count, process, free, model]
                running.append(threads.submit(run_with_jax, *words, devices=devices))
        for done in (each.result() for each in running):
            assert done.returncode == 0, f"{way}: {done.stdout}{done.stderr}"
        return [dict(np.load(folder / f"{way}{process}.npz")) for _, process, _ in processes]

    return functools.cache(run)


@pytest.mark.parametrize("way", [*thorough("eight"), "two", *thorough("model")])
def test_losses_are_those_of_one_device(found, way):
    expected = found("one")[0]["losses"]
    assert len(expected) == 50
    assert expected[-9:].mean() < 0.9 * expected[:9].mean()
    for each in found(way):
        assert np.abs(each["losses"] - expected).max() < 1e-5


@pytest.mark.parametrize("way", ["one", *thorough("eight"), "two", *thorough("model")])
def test_every_sample_of_an_epoch_is_seen_exactly_once(found, cache, way):
    seen = np.concatenate([each["seen"] for each in found(way)])
    dataset = CachedDataset(cache, variant="epoch")
    expected = [zlib.crc32(dataset[row][0].permute(1, 2, 0).numpy().tobytes()) for row in range(144)]
    assert sorted(seen.tolist()) == sorted(expected)


@pytest.mark.parametrize("way", ["one", *thorough("eight"), "two", *thorough("model")])
def test_every_sample_is_evaluated_exactly_once_in_batches_of_one_shape(found, cache, way):
    rows = np.concatenate([each["evaluated"] for each in found(way)])
    expected = [zlib.crc32(image.permute(1, 2, 0).numpy().tobytes()) for image, _ in CachedDataset(cache)]
    assert len(expected) % 16  # so that a batch is padded
    assert sorted(rows.tolist()) == sorted(expected)
