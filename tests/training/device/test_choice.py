"""Which device a name stands for."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import pytest
import torch

from tpucache import UsageError
from tpucache.cli import main
from tpucache.machine import Tpu, gpu_problem
from tpucache.training.device import DEVICES, Choice, CpuDevice, choose_backend, open_device
from tpucache.training.device.torch_device import choose_device, open_accelerator
from tpucache.training.fitting import train
from tpucache.training.options import RunOptions
from tpucache.training.settings import TrainSettings


@pytest.fixture
def here(monkeypatch):
    """Have torch find the devices that a test says, None for a torch without `torch.accelerator`."""

    def have(*kinds, accelerator=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in kinds)
        found = SimpleNamespace(
            is_available=lambda: bool(kinds), current_accelerator=lambda: SimpleNamespace(type=kinds[0])
        )
        monkeypatch.setattr(torch, "accelerator", found if accelerator else None, raising=False)

    return have


@pytest.mark.parametrize(
    ("kinds", "expected"), [((), "cpu"), (("cuda",), "cuda"), (("tpu",), "tpu"), (("mps",), "cpu")]
)
def test_auto_is_the_fastest_device_that_is_there(here, kinds, expected):
    here(*kinds)
    assert choose_device("auto") == expected
    assert choose_device("cpu") == "cpu"


@pytest.mark.parametrize("name", ["cuda", "tpu"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(here, name):
    here()
    with pytest.raises(UsageError, match=rf"no device '{name}' here: torch .* finds cpu\. Use"):
        open_device("torch", device=name)
    here("cuda" if name == "tpu" else "tpu")
    with pytest.raises(UsageError, match=r"finds (cuda|tpu) and cpu"):
        open_device("torch", device=name)


def test_eager_is_the_same_backend():
    assert type(open_device("eager", device="cpu")) is type(open_device("torch", device="cpu")) is CpuDevice


@pytest.mark.parametrize(
    ("backend", "cores", "device", "message"),
    [
        ("torch", 8, "cpu", "the torch backend runs on 1 core"),
        ("torch", 1, "gpu", "there is no device 'gpu'"),
        ("plain", 1, "auto", "use xla or torch"),
    ],
)
def test_what_does_not_fit_together_is_refused(backend, cores, device, message):
    with pytest.raises(UsageError, match=message):
        open_device(backend, cores, device)


@pytest.mark.xla
def test_xla_takes_no_name_of_a_device(on_xla):
    """In a process that has imported it already."""
    on_xla(
        "import pytest\nfrom tpucache import UsageError\nfrom tpucache.training import open_device\n"
        "with pytest.raises(UsageError, match='PJRT_DEVICE'): open_device('xla', 1, 'cpu')"
    )


def test_training_from_python_takes_the_name_of_a_device(here, cache):
    importlib.import_module("torch._dynamo")  # the first step imports it, which needs the real torch.accelerator
    here()
    assert "cuda" in DEVICES
    settings, quick = TrainSettings(model="tiny_models:tiny", epochs=1, batch_size=4), RunOptions(replay=False)
    assert train("tiny_models:tiny", cache, None, settings, device="cpu", options=quick).report.device == "cpu"
    with pytest.raises(UsageError, match="no device 'cuda'"):
        train("tiny_models:tiny", cache, None, settings, device="cuda", options=quick)


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 5), ["sm_75", "sm_80"], True),
        ((6, 0), ["sm_70", "sm_75", "sm_80", "sm_90"], False),  # a P100, and Kaggle's torch
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((10, 3), ["sm_90a", "compute_90a"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["sm_100f", "compute_100f"], False),
        ((6, 0), [], True),
        ((6, 0), ["gfx90a"], False),
    ],
)
def test_a_gpu_runs_what_torch_is_built_for(capability, architectures, runs):
    assert (gpu_problem(capability, architectures) == "") == runs


@pytest.mark.parametrize(
    ("architecture", "reason"), [("sm_80", "built for sm_80"), ("sm_60", "a kernel fails: no image")]
)
def test_a_gpu_that_torch_does_not_run_on_is_refused_before_training(monkeypatch, architecture, reason):
    def fail(*_, **__):
        raise RuntimeError("no image\nCUDA kernel errors")

    module = SimpleNamespace(
        current_device=lambda: 0,
        get_device_capability=lambda _device: (6, 0),
        get_arch_list=lambda: [architecture],
        get_device_name=lambda _device: "Tesla P100",
    )
    monkeypatch.setattr(torch, "cuda", module)
    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(UsageError, match=rf"does not run on Tesla P100: .*{reason}.*T4 x2"):
        open_accelerator("cuda")


CHIPS = Tpu("v5e", 8, ())


@pytest.mark.parametrize(
    ("given", "installed", "environment", "tpu", "backend", "why"),
    [
        ({}, False, {}, CHIPS, "torch", "torch_xla is not installed"),
        ({}, True, {}, None, "torch", "there is no TPU here"),
        ({}, True, {}, CHIPS, "xla", "there is a TPU v5e here, with 8 chips"),
        ({}, True, {"PJRT_DEVICE": "TPU"}, None, "xla", "PJRT_DEVICE is TPU"),
        ({}, True, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}, CHIPS, "torch", "PJRT_DEVICE is CPU"),
        ({"device": "cpu"}, True, {}, CHIPS, "torch", "--device cpu is for the backend torch"),
        ({"compile": True}, True, {}, CHIPS, "torch", "--compile is for the backend torch"),
        ({"processes": 2}, True, {}, CHIPS, "torch", "--processes is for the backend torch"),
        (
            {},
            True,
            {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2"},
            CHIPS,
            "torch",
            "torchrun is for the backend torch",
        ),
        ({"backend": "xla"}, False, {}, None, "xla", ""),
        ({"backend": "eager"}, True, {}, CHIPS, "torch", ""),
    ],
)
def test_the_backend_follows_from_the_machine_unless_it_is_named(
    monkeypatch, given, installed, environment, tpu, backend, why
):
    for name in ("PJRT_DEVICE", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace() if installed else None)
    assert choose_backend(**given, tpu=lambda: tpu) == Choice(backend, why)


def test_a_run_says_which_backend_it_chose_and_why(cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    command = ["train", str(cache), "--run", str(tmp_path / "run"), "--model", "cnn", "--epochs", "1", "--json"]
    assert main(command) == 0
    shown = capsys.readouterr()
    report, first = json.loads(shown.out), shown.err.splitlines()[0]
    assert first.startswith("train: backend torch, as ")
    assert (report["backend"], report["cores"]) == ("torch", 1)
    assert report["chosen"] in first
    assert report["batch"].startswith("8: default for ")
