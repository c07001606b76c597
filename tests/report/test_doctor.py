"""doctor: what it finds, what it advises, how it says so."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from tpucache.machine import Cores, Memory, Space, Tpu
from tpucache.report import doctor
from tpucache.report.doctor import (
    Diagnosis,
    Facts,
    Library,
    Roots,
    TorchDevices,
    Xla,
    advise,
    ask_torch,
    ask_xla,
    diagnose,
    find_decoders,
    find_libraries,
    look_into,
)

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


def facts(versions=VERSIONS, **changed):
    """Return the facts of a machine where all is well, but for what is changed."""
    well = Facts(
        tpucache="1",
        python="3.12.0",
        platform="Linux",
        cores=Cores(96, 96, None),
        memory=Memory(300 * GB, None, 290 * GB),
        shm=Space("/dev/shm", 100 * GB, 100 * GB),
        disk=Space("/kaggle/working", 20 * GB, 20 * GB),
        tpu=TPU,
        xla=Xla("TPU", 8, 7.0),
        environment={"PJRT_DEVICE": "TPU"},
        libraries=tuple(Library(name, version, "something") for name, version in versions.items()),
        decoders={"JPEG": "3.0", "AVIF": ""},
        mounts=(),
    )
    return dataclasses.replace(well, **changed)


def without(*names, **changed):
    return {name: version for name, version in {**VERSIONS, **changed}.items() if name not in names}


def test_where_all_is_well_there_is_nothing_to_fix():
    assert advise(facts()) == ()
    assert "nothing to fix" in Diagnosis(facts(), ()).lines()


@pytest.mark.parametrize(
    ("found", "what", "remedy"),
    [
        (facts(environment={"TPU_PROCESS_ADDRESSES": "local"}), "wait for peers", r"os\.environ\.pop"),
        (facts(environment={"PJRT_DEVICE": "CPU"}), "PJRT_DEVICE=CPU keeps XLA from it", "unset PJRT_DEVICE"),
        (facts(without("torch", "torch_xla"), xla=None, tpu=None), "caches are read by numpy", "pip install torch`"),
        (
            facts(without("torch_xla"), xla=None),
            "torch_xla is not installed",
            "pip install torch==2.9.0 torch_xla==2.9.0",
        ),
        (facts(without("libtpu")), "libtpu is not installed", r"torch_xla\[tpu\]==2.9.0"),
        (facts(without(torch="2.13.0")), "torch 2.13.0 and torch_xla 2.9.0 do not fit", r"torch==2\.9\.\*"),
        (facts(xla=Xla("", 0, 3.0, "in use by process 7")), "in use by process 7", "--backend torch"),
        (facts(xla=Xla("CPU", 1, 3.0)), "there is a TPU, but XLA runs on CPU", "libtpu"),
        (facts(cores=Cores(96, 96, 3.5)), "4 of the 96 cores", "OMP_NUM_THREADS=4"),
        (facts(cores=Cores(96, 8, None)), "8 of the 96 cores", "OMP_NUM_THREADS=8"),
        (facts(memory=Memory(0, None, 0)), "free memory is unknown", "in_memory=True"),
        (facts(memory=Memory(16 * GB, GB, GB // 2)), "536.9 MB of memory are free", "--jobs 1"),
        (facts(shm=Space("/dev/shm", 64 << 20, 0)), "/dev/shm has 67.1 MB", "CachedLoader"),
        (facts(disk=Space("/kaggle/working", 20 * GB, GB)), "1.1 GB are free on the disk", "--codec dct-zstd"),
        (facts(without(albumentationsx="2.1.0")), "AGPL", "uninstall -y albumentationsx"),
        (facts(without(albumentations="1.4.0")), "albumentations 1.4.0", "albumentations==2.0.8"),
        (facts(without("simplejpeg")), "decoded by Pillow", "pip install simplejpeg"),
        (facts(without("cykooz-resizer")), "resizes by Pillow", "pip install cykooz-resizer"),
        (facts(without("llvmlite")), "copied by numpy", "pip install llvmlite"),
    ],
)
def test_each_problem_is_reported_with_its_remedy(found, what, remedy):
    (advice,) = advise(found)
    assert what in advice.what
    assert re.search(remedy, advice.remedy)


def test_the_advised_albumentations_is_the_one_that_is_installed_with_tpucache():
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert '"albumentations==2.0.8"' in project.read_text()


def test_a_machine_made_of_files_is_read_as_it_is(tmp_path, plain, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    (tmp_path / "cpu.max").write_text("100000 100000")
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    shutil.copytree(plain, tmp_path / "input" / "datasets" / "owner" / "plain")
    roots = Roots(tmp_path / "meminfo", tmp_path, tmp_path, tmp_path / "dev", (tmp_path / "input", tmp_path / "none"))
    found = diagnose(roots, {"TPU_PROCESS_ADDRESSES": "local", "HOME": "/"}, xla=False)
    content = json.loads(json.dumps(found.to_dict()))
    assert content["cores"]["quota"] == 1
    assert content["cores"]["usable"] == 1
    assert content["memory"] == {"machine": 8 * GB, "limit": None, "available": 4 * GB}
    assert content["shm"]["path"] == str(tmp_path / "dev" / "shm")
    assert content["environment"] == {"TPU_PROCESS_ADDRESSES": "local"}
    assert content["tpu"] is content["xla"] is None
    assert content["libraries"]["numpy"]
    assert content["mounts"][0]["caches"] == [[str(tmp_path / "input" / "datasets" / "owner" / "plain"), 12]]
    assert 0 < content["mounts"][0]["open_seconds"] < PATIENCE
    assert [advice["what"] for advice in content["advice"] if "wait for peers" in advice["what"]]
    text = "\n".join(found.lines())
    assert "1 usable" in text
    assert "12 samples" in text
    assert "to fix:" in text


def test_a_library_that_is_missing_is_reported_with_what_it_is_for(monkeypatch):
    monkeypatch.setattr(doctor, "_USES", {"numpy": "all", "no-such-library": "much", "not-wanted-either": ""})
    assert [(found.name, bool(found.version)) for found in find_libraries()] == [
        ("numpy", True),
        ("no-such-library", False),
    ]
    lines = Diagnosis(facts(libraries=find_libraries()), ()).lines()
    assert any(
        line.startswith("  no-such-library") and line.endswith("not installed: needed for much") for line in lines
    )


def test_without_torch_or_pillow_nothing_is_said_of_what_they_would_do():
    found = facts(without("torch", "torch_xla", "pillow", "simplejpeg", "cykooz-resizer", jax="0.8.0"), xla=None)
    said = [advice.what for advice in advise(found)]
    assert any("caches are read by JAX" in what for what in said)
    assert any(what.startswith("Pillow is not installed") for what in said)
    assert not any("by Pillow" in what or "cannot be read" in what or "torch_xla" in what for what in said)


def test_decoders_are_reported_also_without_pillow(monkeypatch):
    assert find_decoders()["JPEG"]
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert find_decoders()["JPEG"] == ""


def test_xla_is_asked_in_a_process_without_what_breaks_it():
    code = "import os; print('noise'); print('found', '[\"%s\", 8]' % os.environ.get('TPU_PROCESS_ADDRESSES'))"
    found = ask_xla({**os.environ, "TPU_PROCESS_ADDRESSES": "local"}, command=(sys.executable, "-c", code))
    assert (found.device, found.cores, found.error, found.upload) == ("None", 8, "", None)


def test_how_fast_batches_are_sent_is_a_figure():
    code = "print('found [\"TPU\", 8, 4.25e9]')"
    found = ask_xla(os.environ, command=(sys.executable, "-c", code))
    assert found.upload == 4.25e9
    assert any("batches are sent to it at 4.25 GB/s" in line for line in Diagnosis(facts(xla=found), ()).lines())


def test_a_tpu_may_be_that_of_torch_tpu():
    assert advise(facts(without("torch_xla", "libtpu", torch_tpu="0.2.0"), xla=None)) == ()


@pytest.mark.parametrize(
    ("torch", "line"),
    [
        (None, "not asked"),
        (TorchDevices(("cuda: NVIDIA T4", "cpu")), "cuda: NVIDIA T4, cpu"),
        (TorchDevices((), "no driver\x1b"), r"does not start: no driver\x1b"),
    ],
)
def test_the_devices_of_torch_are_named(torch, line):
    assert f"torch        {line}" in Diagnosis(facts(torch=torch), ()).lines()
    assert "torch        not installed" in Diagnosis(facts(without("torch"), torch=torch), ()).lines()


TORCH = """
from types import SimpleNamespace as Names
is_here = lambda: {here}
def ones(_count, device):
    if device == "cuda:1":
        raise RuntimeError("no kernel image is available\\nCUDA kernel errors might ...")
    return Names(sum=lambda: Names(item=lambda: 2))
cuda = Names(
    is_available=is_here, device_count=lambda: 2, get_device_name=lambda number: f"NVIDIA T{{number}}",
    get_device_capability=lambda number: (7, 5) if number else {capability}, get_arch_list=lambda: ["sm_70", "sm_86"],
)
accelerator = Names(is_available=is_here, device_count=lambda: 8, current_accelerator=lambda: Names(type="tpu"))
"""


@pytest.mark.parametrize(
    ("here", "expected"), [(True, ("cuda: NVIDIA T0", "cuda: NVIDIA T1", "tpu: 8 chips", "cpu")), (False, ("cpu",))]
)
def test_torch_is_asked_for_all_its_devices_and_runs_a_kernel_on_each(tmp_path, here, expected):
    (tmp_path / "torch.py").write_text(TORCH.format(here=here, capability=(7, 0)))
    found = ask_torch({**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found == TorchDevices(expected, broken=("NVIDIA T1: no kernel image is available",) * here)


def test_a_gpu_that_torch_is_not_built_for_is_advised_against(tmp_path):
    (tmp_path / "torch.py").write_text(TORCH.format(here=True, capability=(6, 0)))
    found = ask_torch({**os.environ, "PYTHONPATH": str(tmp_path)})
    first, second = advise(facts(torch=found))
    assert (
        "does not run on NVIDIA T0: its architecture is sm_60, and this torch is built for sm_70, sm_86" in first.what
    )
    assert "T4 x2" in first.remedy
    assert "NVIDIA T1: no kernel image" in second.what


@pytest.mark.parametrize(
    ("code", "seconds", "error"),
    [
        (f"import time; time.sleep({PATIENCE})", 1, "no answer in 1 s"),
        ("raise SystemExit('a\\nthe TPU is in use\\n\\n')", PATIENCE, "the TPU is in use"),
        ("raise SystemExit(3)", PATIENCE, "ended with status 3"),
    ],
)
def test_why_xla_does_not_start_is_reported(code, seconds, error):
    assert ask_xla(os.environ, seconds, (sys.executable, "-c", code)).error == error


def test_a_program_that_is_not_there_is_reported_too():
    assert "No such file" in ask_xla({}, 1, ("/no/such/python",)).error


def test_caches_are_found_within_bounds_and_what_is_none_is_passed_over(plain, tmp_path, monkeypatch):
    monkeypatch.setattr("tpucache.report.doctor._SEARCH_SECONDS", PATIENCE)
    for place in ("a", "b/c/d/e/f/g/h", "b/c/d/e/f/g/i/j", ".hidden"):
        shutil.copytree(plain, tmp_path / place)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{}")
    (tmp_path / "loop").symlink_to(tmp_path)
    mount = look_into(tmp_path)
    assert mount is not None
    assert [Path(path).relative_to(tmp_path).as_posix() for path, _ in mount.caches] == ["a", "b/c/d/e/f/g/h"]
    assert mount.writable == os.access(tmp_path, os.W_OK)
    assert look_into(tmp_path / "none") is None
