"""Augmentation, tasks and networks give on one XLA device and on eight what they give on plain torch."""

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


def pairs(found, name, kind):
    for key, expected in found["eager"][kind].items():
        actual = found[name][kind][key]
        if key.endswith("compiles"):
            assert actual[-1] == actual[0]
        else:
            yield from zip(expected, actual, strict=True)


@EACH
def test_random_operations_are_those_of_plain_torch_and_compile_once(found, name):
    for one, other in pairs(found, name, "operations"):
        assert one.shape == other.shape
        # A multiply and an add may be one fused operation, or two, and so end on the other side of a whole number.
        assert (one.int() != other.int()).float().mean() < 2e-3
        assert one.float().std() > 30


@EACH
def test_other_sizes_and_crops_differ_by_a_level_at_most_and_compile_once(found, name):
    for images, own in pairs(found, name, "sizes"):
        assert images.shape == own.shape == (16, 3, 16, 16)
        assert (images.int() - own.int()).abs().max() <= 1


@EACH
@pytest.mark.parametrize("part", ["tasks", "models"])
def test_losses_gradients_predictions_and_networks_are_those_of_plain_torch(found, name, part):
    for key, expected in found["eager"][part].items():
        torch.testing.assert_close(found[name][part][key], expected, atol=1e-5, rtol=1e-5)
    assert found[name]["tasks"]["mask"][-1].dtype == torch.float32


@EACH
def test_scores_of_masks_compile_once(found, name):
    compiles = found[name]["scores"]["compiles"]
    assert compiles[-1] == compiles[1]
