"""The same commands on plain torch, on one XLA device and on eight."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from once import once
from running import command, report_of
from test_inputs import make_cache
from thorough import thorough

from tpucache import Recipe, build_cache

pytestmark = pytest.mark.slow

TINY = "--model tiny_models:tiny --valid 0.2 --batch-size 16"
EVERYTHING = (
    f"{TINY} --epochs 3 --ema 0.9 --smoothing 0.1 --flip --mixup 0.3 "
    "--augment vertical_flip,rotate,shift=2,brightness=0.2,contrast=0.4,saturation=0.4,erase=0.2,cutmix=1"
)
#: What is trained, on the cache of the same name or on that of the photographs.
COMMANDS = {
    "sgd": f"{EVERYTHING} --optimizer sgd --lr 0.02 --clip 0.1",
    "adamw": f"{EVERYTHING} --optimizer adamw --lr 0.002 --clip 0.1 --resident yes",
    "packed": f"{TINY} --epochs 2 --lr 0.02 --flip --augment shift=2,brightness=0.2,views=2",
    "grey": f"{TINY} --epochs 3 --lr 0.02 --flip --mixup 0.3 --model tiny_models:tiny_grey "
    "--augment rotate,shift=2,brightness=0.1,contrast=0.2,erase=0.3",
    "columns": "--model test_inputs:age_and_image --inputs age,sex --valid 0.4 --epochs 2 --batch-size 16 --lr 0.3",
    "texts": "--model tiny_tasks:Bag --valid 0.25 --epochs 4 --batch-size 16 --lr 0.1 --optimizer adamw",
}


def build(name, photos, folder):
    if name == "packed":
        build_cache(photos, folder / "cache", Recipe(size=16, codec="dct-zstd", quality=100), jobs=1)
    elif name == "grey":
        noise = np.random.default_rng(0).integers(0, 40000, (80, 16, 16, 1))
        items = [((pixels + 20000 * (at % 2)).astype(np.uint16), at % 2) for at, pixels in enumerate(noise)]
        build_cache(items, folder / "cache", Recipe(size=16, mode="keep"), jobs=1)
    elif name == "columns":
        make_cache(photos, folder)
    else:
        build_cache(f"tiny_tasks:{name}", folder / "cache", Recipe(size=16), jobs=1)


@pytest.fixture(scope="module")
def runs(cache, photos, python, tmp_path_factory):
    """The function `runs(name, cores)`: the report and the checkpoint of a command, without cores on plain torch."""

    def runs(name, cores):
        def train(folder):
            place = cache
            if name not in ("sgd", "adamw"):
                place = once(tmp_path_factory, f"cache-{name}", functools.partial(build, name, photos)) / "cache"
            words = ["train", place, "--run", folder / "run", *COMMANDS[name].split()]
            if not cores:
                assert command(*words, "--backend", "torch", "--device", "cpu") == 0
                return
            done = python("-m", "tpucache", *words, "--backend", "xla", "--cores", cores, devices=cores)
            assert done.returncode == 0, done.stderr

        run = once(tmp_path_factory, f"{name}-{cores}", train) / "run"
        return report_of(run), torch.load(run / "last.pt", weights_only=True)["learner"]["model"]

    return functools.cache(runs)


@pytest.mark.xla
@pytest.mark.parametrize("cores", [8, *thorough(1)])
@pytest.mark.parametrize("name", ["sgd", "adamw", "columns", *thorough("packed", "grey", "texts")])
def test_a_command_learns_on_xla_what_it_learns_on_plain_torch_and_compiles_two_steps(runs, name, cores):
    (expected, known), (found, weights) = (runs(name, each) for each in (0, cores))
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-4)
    assert abs(found["losses"][-1] - found["losses"][0]) > 1e-3
    assert (found["pace"]["compiles"], found["pace"]["steps"]) == (0, len(found["losses"]) - 2)
    for row, other in zip(found["epochs"], expected["epochs"], strict=True):
        # AdamW makes a whole step of the rounding error that is all the gradient a bias before BatchNorm has.
        assert row["valid_loss"] == pytest.approx(other["valid_loss"], abs=1e-3 if name == "adamw" else 1e-4)
        assert row == pytest.approx(other, abs=1e-3)
    assert all(tensor.device.type == "cpu" for tensor in weights.values())
    for key, value in known.items() if name == "sgd" else ():
        # XLA's BatchNorm keeps the biased variance, torch the unbiased: n / (n - 1) of 16 images of 16x16 pixels.
        relative = 1 / (16 * 16 * 16 - 1) if key.endswith("running_var") else 0
        torch.testing.assert_close(weights[key], value, atol=1e-5, rtol=relative)


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


@pytest.mark.parametrize(("backend", "cores"), [("eager", 1), *thorough(pytest.param("xla", 8, marks=pytest.mark.xla))])
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


KEEPING = """
import os, stat, sys
from pathlib import Path
from tpucache.training.device.xla import keep_compiled

os.environ["XDG_CACHE_HOME"], kind, expected = sys.argv[1:]
folder = Path(sys.argv[1], "tpucache-xla")
if expected == "shared":
    folder.mkdir()
    folder.chmod(0o777)
for _ in range(2):
    keep_compiled(kind)
kept = os.environ.get("XLA_PERSISTENT_CACHE_PATH")
assert kept == (str(folder) if expected == "kept" else None), kept
if kept:
    import torch, torch_xla
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    torch.ones(3, device=torch_xla.device()).add(1).cpu()
    assert any(folder.iterdir())
"""


@pytest.mark.xla
@pytest.mark.parametrize(("kind", "expected"), [("TPU", "kept"), ("TPU", "shared"), ("CPU", "not kept")])
def test_compiled_graphs_are_kept_where_the_runtime_reads_them_in_a_folder_of_the_users_own(
    python, tmp_path, kind, expected
):
    (tmp_path / "keeping.py").write_text(KEEPING)
    (tmp_path / "home").mkdir()
    done = python(tmp_path / "keeping.py", tmp_path / "home", kind, expected)
    assert done.returncode == 0, done.stderr
    assert ("are not kept" in done.stderr) == (expected == "shared")


#: What `doctor` says of a device.
UPLOAD = """
from tpucache.training.device import open_device
from tpucache.training.feed import measure_upload

assert measure_upload(open_device("xla"), 0.01) > 1e6
"""


@pytest.mark.xla
def test_the_rate_of_sending_batches_is_measured(on_xla):
    on_xla(UPLOAD, devices=8)


#: Does what importing torch_xla does in a process that is asked for no device; a fork has imported it already.
UNASKED = """
import os, sys
del os.environ["PJRT_DEVICE"]
from tpucache.training.device import xla
os.environ["PJRT_DEVICE"] = "CPU"
from tpucache.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.xla
@pytest.mark.parametrize("is_fork", [True, *thorough(False)])
def test_a_missing_tpu_is_reported_and_cores_that_are_neither_one_nor_all_are_refused(cache, python, tmp_path, is_fork):
    words = ["train", cache, "--run", tmp_path / "run", "--backend", "xla", "--cores", 4, "--batch-size", 8]
    (tmp_path / "unasked.py").write_text(UNASKED)
    program = [tmp_path / "unasked.py"] if is_fork else ["-m", "tpucache"]
    done = python(*program, *words, devices=8, asked=is_fork)
    assert done.returncode == 2
    assert "no TPU found" in done.stderr
    assert "this machine has 8" in done.stderr
    assert "Traceback" not in done.stderr


AHEAD = """
import json, sys, time
import torch
import torch_xla.debug.metrics as met
from tpucache.training.device import open_device, xla
from tpucache.training.device.tensors import to_host

cores = int(sys.argv[1])
device, waits, event = open_device("xla", cores), [], xla.on_ready_event

def spied(tensor):
    ready = event(tensor)
    wait = ready.wait
    ready.wait = lambda: (wait(), waits.append(id(tensor)))
    return ready

batch = device.put(torch.arange(2 * cores, dtype=torch.float32).repeat_interleave(3).view(-1, 3))
rows = device.fetch_rows(batch * 2)
device.step_end()
rows = rows().tolist()
device.wait()
xla.on_ready_event = spied
values, sent, left = torch.rand(300, 300, device=device.torch_device), [], []
before, began = device.counters().execute_seconds, time.time()
for _ in range(6):
    for _ in range(4):
        values = (values @ values) / 300
    device.step_end()
    sent.append(id(device._sent[-1]))
    left.append(len(device._sent))
device.wait()
wall, busy = time.time() - began, device.counters().execute_seconds - before
def transfers():
    return (met.metric_data("TransferFromDeviceTime") or [0])[0]

more = {"model": {f"{number}": values + number for number in range(3)}, "step": [7, torch.ones(1)]}
device.wait()
read = transfers()
more = to_host(more, copy=True)
read = transfers() - read
right = all(torch.equal(more["model"][f"{n}"], (values + n).cpu()) for n in range(3)) and more["step"] == [7, 1.0]
for _ in range(3 * xla._READ_AFTER if cores == 1 else 0):  # more executions than the runtime keeps the times of, in all
    for _ in range(6):
        values = values + 1
        xla.torch_xla.sync()
    device.step_end()
counted = sum(device._executions._counted.values())
device.counters()
name = "ExecuteTime" if cores == 1 else "ExecuteReplicatedTime"
print(json.dumps({
    "rows": rows, "waited": waits[:4] == sent[:4], "left": left, "busy": busy, "wall": wall,
    "sliced": device._is_sliced,
    "kept": len(met.metric_data(name)[2]), "unread": met.metric_data(name)[0] - counted,
    "peak": device.peak_bytes(), "transfers": read, "right": right,
}))
"""


@pytest.mark.xla
@pytest.mark.parametrize("cores", [1, 8])
def test_xla_runs_two_steps_ahead_and_counts_the_time_in_which_anything_ran(on_xla, cores):
    found = json.loads(on_xla(AHEAD, cores, devices=cores).splitlines()[-1])
    assert found["rows"] == [[2.0 * row] * 3 for row in range(2 * cores)]
    assert found["sliced"] == (cores > 1)
    assert (found["left"], found["waited"]) == ([1, 2, 2, 2, 2, 2], True)
    assert 0 < found["busy"] <= found["wall"]
    assert cores > 1 or found["kept"] == 1024
    assert found["unread"] < 1024  # nothing was forgotten before it was read
    assert found["peak"] is None  # and not the host's
    assert (found["transfers"], found["right"]) == (1, True)  # of three tensors
