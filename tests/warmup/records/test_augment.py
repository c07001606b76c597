"""Augmentation: a pure function of (image, seed, sample, variant), from presets, files and callables."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from patience import PATIENCE

from tpucache.warmup.plan import resolve
from tpucache.warmup.records.augment import PRESETS, augment

Pixels = npt.NDArray[np.uint8]

_SIDE = 24
_PLACES = [(seed, number, variant) for seed in (0, 1) for number in (0, 1, 2**40) for variant in (1, 2)]

# Run in a process of its own. It refuses the network and notes who asks for it, then augments in reverse order.
_PROBE = """
import hashlib, json, socket, sys
asked = []
def refuse(name):
    def call(*arguments, **options):
        asked.append(f"{name} {arguments!r}")
        raise OSError("no network here")
    return call
socket.socket.connect = refuse("connect")
socket.socket.connect_ex = refuse("connect_ex")
socket.getaddrinfo = refuse("getaddrinfo")
import numpy as np
from tpucache.warmup.plan import resolve
from tpucache.warmup.records.augment import augment
torch_after = {"import": "torch" in sys.modules}
definition = resolve("strong", SIDE, SIDE)
torch_after["resolve"] = "torch" in sys.modules
image = np.random.default_rng(7).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
digests = {
    repr(place): hashlib.sha256(augment(image, definition, *place)).hexdigest() for place in reversed(PLACES)
}
print(json.dumps({"asked": asked, "torch": torch_after, "digests": digests}))
"""


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if "ALBUMENTATIONS" not in name}
    script = f"SIDE = {_SIDE}\nPLACES = {_PLACES!r}\n{_PROBE}"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
@pytest.mark.thorough
def test_another_process_and_another_order_give_the_same_pixels(probe: dict[str, Any], image: Pixels) -> None:
    definition = resolve("strong", _SIDE, _SIDE)
    here = {repr(p): hashlib.sha256(augment(image, definition, *p)).hexdigest() for p in _PLACES}
    assert probe["digests"] == here


def test_nothing_asks_the_network(probe: dict[str, Any]) -> None:
    assert probe["asked"] == []


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("step", ["import", "resolve"])
def test_torch_stays_unloaded(probe: dict[str, Any], step: str) -> None:
    assert probe["torch"][step] is False


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_arguments_give_the_same_image_whatever_came_before(preset: str, image: Pixels) -> None:
    definition = resolve(preset, _SIDE, _SIDE)
    first = [augment(image, definition, *place) for place in _PLACES]
    again = [augment(image, definition, *place) for place in reversed(_PLACES)][::-1]
    np.testing.assert_array_equal(first, again)


def test_another_seed_sample_or_variant_gives_another_image(image: Pixels) -> None:
    definition = resolve("strong", _SIDE, _SIDE)
    images = {augment(image, definition, *place).tobytes() for place in _PLACES}
    assert len(images) == len(_PLACES)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("shape", [(24, 24), (17, 40)], ids=str)
def test_every_preset_keeps_shape_and_dtype_and_changes_something(preset: str, shape: tuple[int, int]) -> None:
    image = np.random.default_rng(3).integers(0, 256, (*shape, 3), np.uint8)
    definition = resolve(preset, *shape)
    results = [augment(image, definition, 0, number, 1) for number in range(8)]
    assert all(result.shape == image.shape and result.dtype == np.uint8 for result in results)
    assert all(result.flags.c_contiguous for result in results)
    assert any((result != image).any() for result in results)


def test_the_given_image_is_left_as_it_was(image: Pixels) -> None:
    before = image.copy()
    for number in range(8):
        augment(image, resolve("strong", _SIDE, _SIDE), 0, number, 1)
    np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_definition_survives_json(preset: str) -> None:
    definition = resolve(preset, _SIDE, _SIDE)
    assert json.loads(json.dumps(definition)) == definition


@pytest.mark.slow
def test_two_flips_at_half_occur_independently(two_flips: Path, image: Pixels) -> None:
    definition = resolve(str(two_flips), _SIDE, _SIDE)
    outcomes = {
        image[:: -1 if vertical else 1, :: -1 if horizontal else 1].tobytes(): (horizontal, vertical)
        for horizontal, vertical in itertools.product((False, True), repeat=2)
    }
    counts = Counter(outcomes[augment(image, definition, 0, number, 1).tobytes()] for number in range(400))
    assert len(counts) == 4
    assert all(60 <= count <= 140 for count in counts.values()), counts


@pytest.mark.slow
def test_flips_of_two_variants_of_a_sample_occur_independently(two_flips: Path, image: Pixels) -> None:
    definition = resolve(str(two_flips), _SIDE, _SIDE)
    equal = sum(
        augment(image, definition, 0, number, 1).tobytes() == augment(image, definition, 0, number, 2).tobytes()
        for number in range(400)
    )
    assert 60 <= equal <= 140


def test_flips_of_given_samples_stay_what_they_are(two_flips: Path, image: Pixels) -> None:
    definition = resolve(str(two_flips), _SIDE, _SIDE)
    found = ""
    for number in range(12):
        result = augment(image, definition, 3, number, 1)
        found += next(
            name
            for name, step in {"-": (1, 1), "h": (1, -1), "v": (-1, 1), "b": (-1, -1)}.items()
            if (result == image[:: step[0], :: step[1]]).all()
        )
    assert found == "vhvhvhhhh-bv"
