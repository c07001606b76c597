"""A recipe sets what it says, what is given replaces that, and a run keeps what was set."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tpucache import UsageError
from tpucache.cli import main
from tpucache.training import TrainSettings, recipe_settings
from tpucache.training.device import CpuDevice
from tpucache.training.learn.defaults import decide_precision
from tpucache.training.recipes import RECIPES

GIVEN = {"finetune": {"weights": "file"}}
TRAINING = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_its_settings_and_says_all_of_them(name):
    recipe, found = RECIPES[name], recipe_settings(name, **GIVEN.get(name, {}))
    for key, value in (*recipe.settings.items(), *recipe.augment.items()):
        assert getattr(found.augment if key in recipe.augment else found, key) == value
        assert key.replace("_", "-") in found.recipe
    assert found.mix_off == round(recipe.mix_off * found.epochs)
    assert found.lr is found.weight_decay is None  # by optimizer, model and batch


@pytest.mark.parametrize("name", RECIPES)
def test_the_documentation_has_all_that_a_recipe_sets(name):
    line = next(line for line in TRAINING.read_text().splitlines() if line.startswith(f"| `{name}` |"))
    found = recipe_settings(name, **GIVEN.get(name, {})).recipe.removeprefix(f"{name}: ").split(", ")
    assert re.findall(r"`--([^`]+)`", line) == found


def test_what_is_given_replaces_what_a_recipe_sets():
    found = recipe_settings("vit", {"mixup": 0.0, "crop": False}, epochs=20, ema=None, schedule="one-cycle")
    assert (found.epochs, found.mix_off, found.ema, found.schedule) == (20, 2, None, "one-cycle")
    assert (found.augment.mixup, found.augment.cutmix, found.augment.crop) == (0, 1, False)
    assert not re.search("mixup|crop|zoom|ema|schedule|epochs", found.recipe)
    assert recipe_settings("vit", {"trivial_augment": True}).augment.rand_augment == 0


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("finetune", {}, "begins with trained weights"),
        ("quicker", {}, "use quick, finetune, scratch, vit"),
        ("quick", {"lrr": 1}, "the recipe quick cannot be used: .*'lrr'"),
    ],
)
def test_what_cannot_be_meant_is_refused(name, given, words):
    with pytest.raises(UsageError, match=words):
        recipe_settings(name, **given)


def test_mixed_precision_is_what_the_device_has():
    class OnXla(CpuDevice):
        name = "xla"
        precisions = ("float32", "bf16")

    class OnGpu(CpuDevice):
        precisions = ("fp16", "float32")

    mixed = TrainSettings(precision="mixed")
    found = [decide_precision(mixed, device()).precision for device in (CpuDevice, OnXla, OnGpu)]
    assert found == ["float32", "bf16", "fp16"]


@pytest.mark.slow
def test_the_command_line_takes_a_recipe_and_replaces_its_parts(cache, tmp_path, capsys):
    command = ["train", str(cache), "--run", str(tmp_path / "run"), "--backend", "torch", "--model", "cnn", "--json"]
    command += ["--recipe", "scratch", "--epochs", "2", "--batch-size", "50", "--no-crop", "--clip", "5"]
    command += ["--ema", "0.9"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["recipe"] == "scratch: smoothing 0.1, precision mixed, mix-off 0, flip, mixup 0.2"
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert (settings["epochs"], settings["ema"], settings["clip"], settings["batch_size"]) == (2, 0.9, 5, 50)
    assert (settings["augment"]["crop"], settings["augment"]["mixup"]) == (False, 0.2)
    assert main([*command, "--resume"]) == 0
    assert main([*command[:-2], "--resume"]) == 2  # other parts
