"""doctor: what it finds, what it advises, how it says so."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from tpucache.machine import Cores, Memory, Space, Tpu
from tpucache.report.doctor import Diagnosis, Mount, ask, diagnose

GB = 1 << 30
VERSIONS = {
    "torch": "2.9.0+cpu",
    "torch_xla": "2.9.0",
    "libtpu": "0.0.21",
    "pillow": "12.0.0",
    "simplejpeg": "1.9.0",
    "cykooz-resizer": "4.0.1",
    "llvmlite": "0.47.0",
    "albumentations": "2.0.8",
}
TPU = Tpu("v5e", 8, ("accel0",))
XLA = {"device": "TPU", "cores": 8, "seconds": 7.0, "error": "", "upload": None}


def found(versions=VERSIONS, **changed):
    """Return the facts of a machine where all is well, but for what is changed."""
    well = Diagnosis(
        tpucache="1",
        python="3.12.0",
        platform="Linux",
        cores=Cores(96, 96, None),
        memory=Memory(300 * GB, None, 290 * GB),
        shm=Space("/dev/shm", 100 * GB, 100 * GB),
        disk=Space("/kaggle/working", 20 * GB, 20 * GB),
        tpu=TPU,
        xla=XLA,
        torch=None,
        environment={"PJRT_DEVICE": "TPU"},
        libraries=versions,
        mounts=(),
    )
    return dataclasses.replace(well, **changed)


def without(*names, **changed):
    return {name: version for name, version in {**VERSIONS, **changed}.items() if name not in names}


def test_where_all_is_well_there_is_nothing_to_fix():
    assert found().advice == []
    assert "nothing to fix" in found().lines()
    assert found(without("torch_xla", "libtpu", torch_tpu="0.2.0"), xla=None).advice == []  # the TPU of torch_tpu


SLOW = Mount(Space("/nfs", GB, GB), writable=True, network="nfs4")


@pytest.mark.parametrize(
    ("diagnosis", "what", "remedy"),
    [
        (found(environment={"TPU_PROCESS_ADDRESSES": "local"}), "wait for peers", r"os\.environ\.pop"),
        (found(environment={"PJRT_DEVICE": "CPU"}), "PJRT_DEVICE=CPU keeps XLA from it", "unset PJRT_DEVICE"),
        (found(without("torch", "torch_xla"), xla=None, tpu=None), "caches are read by numpy", "pip install torch`"),
        (found(without("torch_xla"), xla=None), "torch_xla is not installed", "install torch==2.9.0 torch_xla==2.9.0"),
        (found(without("libtpu")), "libtpu is not installed", r"torch_xla\[tpu\]==2.9.0"),
        (found(without(torch="2.13.0")), "torch 2.13.0 and torch_xla 2.9.0 do not fit", r"torch==2\.9\.\*"),
        (found(xla={"error": "in use by process 7"}), "in use by process 7", "--backend torch"),
        (found(xla={**XLA, "device": "CPU"}), "there is a TPU, but XLA runs on CPU", "libtpu"),
        (found(torch={"broken": ["T4: no kernel"], "devices": [], "error": ""}), "does not run on T4: no", "T4 x2"),
        (found(cores=Cores(96, 96, 3.5)), "4 of the 96 cores", "OMP_NUM_THREADS=4"),
        (found(cores=Cores(96, 8, None)), "8 of the 96 cores", "OMP_NUM_THREADS=8"),
        (found(memory=Memory(0, None, 0)), "free memory is unknown", "in_memory=True"),
        (found(memory=Memory(16 * GB, GB, GB // 2)), "536.9 MB of memory are free", "--jobs 1"),
        (found(shm=Space("/dev/shm", 64 << 20, 0)), "/dev/shm has 67.1 MB", "CachedLoader"),
        (found(disk=Space("/kaggle/working", 20 * GB, GB)), "1.1 GB are free on the disk", "--codec dct-zstd"),
        (found(mounts=[SLOW]), "/nfs is on nfs4, across a network", "--cache-dir"),
        (found(without(albumentationsx="2.1.0")), "AGPL", "uninstall -y albumentationsx"),
        (found(without(albumentations="1.4.0")), "albumentations 1.4.0", "albumentations==2.0.8"),
        (found(without("simplejpeg")), "decoded by Pillow", "pip install simplejpeg"),
        (found(without("cykooz-resizer")), "resizes by Pillow", "pip install cykooz-resizer"),
        (found(without("llvmlite")), "copied by numpy", "pip install llvmlite"),
    ],
)
def test_each_problem_is_reported_with_its_remedy(diagnosis, what, remedy):
    ((problem, action),) = diagnosis.advice
    assert what in problem
    assert re.search(remedy, action)
    assert [f"  1. {problem}", f"     -> {action}"] == diagnosis.lines()[-2:]


def test_the_advised_albumentations_is_the_one_that_is_installed_with_tpucache():
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert '"albumentations==2.0.8"' in project.read_text()


def test_a_machine_made_of_files_is_read_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setitem(sys.modules, "PIL", None)
    for folder in ("proc", "sys/fs/cgroup", "dev/shm"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 100000")
    (tmp_path / "kaggle/input").mkdir(parents=True)
    diagnosis = diagnose(tmp_path, {"TPU_PROCESS_ADDRESSES": "local", "HOME": "/"}, xla=False)
    content = json.loads(json.dumps(diagnosis.to_dict()))
    assert (content["cores"]["quota"], content["cores"]["usable"]) == (1, 1)
    assert content["memory"] == {"machine": 8 * GB, "limit": None, "available": 4 * GB}
    assert content["shm"]["path"] == str(tmp_path / "dev" / "shm")
    assert content["environment"] == {"TPU_PROCESS_ADDRESSES": "local"}
    assert content["tpu"] is content["xla"] is None
    assert content["libraries"]["numpy"]
    places = [tmp_path / "kaggle/input", tmp_path / "here"]  # the other mounts are not there
    assert [mount["space"]["path"] for mount in content["mounts"]] == list(map(str, places))
    assert [mount["writable"] for mount in content["mounts"]] == [os.access(place, os.W_OK) for place in places]
    assert [advice["what"] for advice in content["advice"] if "wait for peers" in advice["what"]]
    text = "\n".join(diagnosis.lines())
    for part in ("1 usable", f"{places[0]}: ", "to fix:"):
        assert part in text


def test_a_library_that_is_missing_is_reported_with_what_it_is_for():
    lines = found({"numpy": "2.0", "lmdb": "", "torch_tpu": ""}).lines()
    assert "  lmdb             -          not installed: needed for warmup" in lines
    assert not any("torch_tpu" in line for line in lines)


def test_without_torch_or_pillow_nothing_is_said_of_what_they_would_do():
    lacking = without("torch", "torch_xla", "pillow", "simplejpeg", "cykooz-resizer", jax="0.8.0")
    said = [what for what, _ in found(lacking, xla=None).advice]
    assert any("caches are read by JAX" in what for what in said)
    assert any(what.startswith("Pillow is not installed") for what in said)
    assert not any("by Pillow" in what or "torch_xla" in what for what in said)


@pytest.mark.parametrize(
    ("torch", "line"),
    [
        (None, "not asked"),
        ({"devices": ["cuda: NVIDIA T4", "cpu"], "error": ""}, "cuda: NVIDIA T4, cpu"),
        ({"error": "no driver\x1b"}, r"does not start: no driver\x1b"),
    ],
)
def test_the_devices_of_torch_and_the_rate_of_xla_are_named(torch, line):
    lines = found(torch=torch, xla={**XLA, "upload": 4.25e9}).lines()
    assert f"torch        {line}" in lines
    assert "XLA          TPU, cores: 8, started in 7.0 s, batches are sent to it at 4.25 GB/s" in lines
    assert "torch        torch is not installed" in found(without("torch"), torch=torch).lines()


TORCH = """
from types import SimpleNamespace as Names
is_here = lambda: True
def ones(_count, device):
    if device == "cuda:1":
        raise RuntimeError("no kernel image is available\\nCUDA kernel errors might ...")
    return Names(sum=lambda: Names(item=lambda: 2))
cuda = Names(
    is_available=is_here, device_count=lambda: 2, get_device_name=lambda number: f"NVIDIA T{number}",
    get_device_capability=lambda number: (7, 5) if number else (6, 0), get_arch_list=lambda: ["sm_70", "sm_86"],
)
accelerator = Names(is_available=is_here, device_count=lambda: 8, current_accelerator=lambda: Names(type="tpu"))
"""


XLA_RUNTIME = """
import os, tpucache.plugins
device_type = lambda: str(os.environ.get("TPU_PROCESS_ADDRESSES"))
global_runtime_device_count = lambda: 8
tpucache.plugins.is_there = lambda name: False  # the rate of uploads is not measured
"""


def test_torch_is_asked_for_all_its_devices_and_runs_a_kernel_on_each(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").touch()
    (tmp_path / "torch_xla" / "runtime.py").write_text(XLA_RUNTIME)
    monkeypatch.chdir(tmp_path)
    found = diagnose(environ={**os.environ, "PYTHONPATH": str(tmp_path), "TPU_PROCESS_ADDRESSES": "local"})
    assert found.xla is None or (found.xla["device"], found.xla["cores"]) == ("None", 8)  # without what breaks it
    asked = found.torch
    assert asked["devices"] == ["cuda: NVIDIA T0", "cuda: NVIDIA T1", "tpu: 8 chips", "cpu"]
    wrong = "NVIDIA T0: its architecture is sm_60, and this torch is built for sm_70, sm_86"
    assert asked["broken"] == [wrong, "NVIDIA T1: no kernel image is available"]


@pytest.mark.parametrize(
    ("code", "seconds", "error"),
    [
        ("print('noise'); print('found', '{\"cores\": 8}')", PATIENCE, ""),
        (f"import time; time.sleep({PATIENCE})", 1, "no answer in 1 s"),
        ("raise SystemExit('a\\nthe TPU is in use\\n\\n')", PATIENCE, "the TPU is in use"),
        ("raise SystemExit(3)", PATIENCE, "ended with status 3"),
    ],
)
def test_why_xla_does_not_start_is_reported(code, seconds, error):
    answer = ask(code, os.environ, seconds)
    assert answer["error"] == error
    assert answer.get("cores") == (None if error else 8)
