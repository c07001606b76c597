"""Augmentation, tasks, optimizers and averages give on one XLA device and on eight what they give on plain torch."""

from __future__ import annotations

import functools

import pytest
import step_parts
import torch
from once import once
from thorough import thorough

from tpucache.training.device import CpuDevice

pytestmark = pytest.mark.xla

CORES = {"one": 1, "eight": 8}
#: AdamW divides a gradient by its own size, and so scales up the rounding of small ones.
NOISE = {"sgd": 1e-5, "adamw": 3e-4}
#: XLA's BatchNorm keeps the biased variance, torch the unbiased: n / (n - 1) of two views of 16 images of 4x4 places.
BIASED = 1 / (2 * 16 * 4 * 4 - 1)


@pytest.fixture(scope="module")
def parts(python, tmp_path_factory):
    """The function `parts(name)`: what every part gave on a backend."""

    def parts(name):
        def run(folder):
            if name == "eager":
                return torch.save(step_parts.run(CpuDevice()), folder / "parts.pt")
            done = python("-m", "step_parts", "xla", CORES[name], folder / "parts.pt", devices=CORES[name])
            assert done.returncode == 0, done.stderr
            return None

        return torch.load(once(tmp_path_factory, f"parts-{name}", run) / "parts.pt", weights_only=True)

    return functools.cache(parts)


@pytest.fixture
def found(parts, name):
    """What every part gave on plain torch, and on the backend of a test."""
    return {each: parts(each) for each in ("eager", name)}


EACH = pytest.mark.parametrize("name", [*thorough("one"), "eight"])


@EACH
def test_bytes_are_moved_exactly_and_colours_nearly(found, name):
    expected, actual = found["eager"]["augment"], found[name]["augment"]
    assert len(expected) == 8
    for key, (pixels, masks, mixed, targets) in expected.items():
        tolerance = 1e-6 if key.startswith("moves") else 2e-5  # (x - mean) / std may be one fused operation, or two
        torch.testing.assert_close(actual[key][0], pixels, atol=tolerance, rtol=1e-6)
        assert torch.equal(actual[key][1], masks)
        torch.testing.assert_close(actual[key][2], mixed, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(actual[key][3], targets, atol=1e-6, rtol=1e-6)


@EACH
def test_random_operations_are_those_of_plain_torch_and_compile_once(found, name):
    for key, expected in found["eager"]["operations"].items():
        actual = found[name]["operations"][key]
        if key.endswith("compiles"):
            assert actual[-1] == actual[0]
            continue
        for one, other in zip(expected, actual, strict=True):
            assert one.shape == other.shape
            # A multiply and an add may be one fused operation, or two, and so end on the other side of a whole number.
            assert (one.int() != other.int()).float().mean() < 2e-3
            assert one.float().std() > 30


@EACH
def test_other_sizes_and_crops_differ_by_a_level_at_most_and_compile_once(found, name):
    for key, expected in found["eager"]["sizes"].items():
        actual = found[name]["sizes"][key]
        if key.endswith("compiles"):
            assert actual[-1] == actual[0]
            continue
        for images, own in zip(expected, actual, strict=True):
            assert images.shape == own.shape == (16, 3, 16, 16)
            assert (images.int() - own.int()).abs().max() <= 1


@EACH
@pytest.mark.parametrize("part", ["tasks", "models"])
def test_losses_gradients_predictions_and_networks_are_those_of_plain_torch(found, name, part):
    for key, expected in found["eager"][part].items():
        torch.testing.assert_close(found[name][part][key], expected, atol=1e-5, rtol=1e-5)
    assert found[name]["tasks"]["mask"][-1].dtype == torch.float32


@EACH
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_run_of_all_parts_is_that_of_plain_torch(found, name, kind):
    expected, actual = found["eager"][kind], found[name][kind]
    for key, tolerance in (("losses", 1e-4), ("norms", 1e-4), ("evaluated", BIASED)):
        torch.testing.assert_close(actual[key], expected[key], atol=tolerance, rtol=1e-4)
    assert max(expected["norms"]) > 0.07  # or nothing was clipped
    for theirs, ours in ((expected["model"], actual["model"]), (expected["ema"]["average"], actual["ema"]["average"])):
        for key, value in theirs.items():
            relative = BIASED if key.endswith("running_var") else 1e-4
            torch.testing.assert_close(ours[key], value, atol=NOISE[kind], rtol=relative)


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["augment", "tasks", "sgd", "adamw"])
def test_eight_devices_give_what_one_gives(parts, part):
    one, eight = parts("one")[part], parts("eight")[part]
    for key in one.keys() - {"compiles"}:
        torch.testing.assert_close(eight[key], one[key], atol=NOISE.get(part, 1e-5), rtol=1e-5)


@EACH
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_nothing_compiles_after_the_second_step(found, name, kind):
    compiles = found[name][kind]["compiles"]
    assert compiles[-1] == compiles[1]
    assert name == "eight" or compiles[1] == compiles[0]


@EACH
def test_scores_of_masks_compile_once(found, name):
    compiles = found[name]["scores"]["compiles"]
    assert compiles[-1] == compiles[1]
