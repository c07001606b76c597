"""Seeding: a custom augmentation is reproducible whatever generators it draws from, or is refused at the start."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE

from tpucache.errors import RecipeError
from tpucache.warmup.plan import resolve
from tpucache.warmup.records.augment import augment

_SIDE = 16
_IMAGE = np.random.default_rng(3).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
_PLACES = [(seed, number, variant) for seed in (0, 1) for number in (0, 1, 2**40) for variant in (1, 2)]
_NOISE = "import random\nimport numpy as np\ndef noise(image, generator):\n    return image ^ {}\n"
_DRAWS = {
    "random": "np.uint8(random.randrange(256))",
    "np.random": "np.random.randint(0, 256, image.shape).astype(np.uint8)",
    "both": "np.uint8(random.randrange(256)) ^ np.uint8(np.random.randint(256))",
    "their own": "generator.integers(0, 256, image.shape, np.uint8)",
}


@pytest.fixture
def custom(
    write_module: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], dict[str, Any]]:
    def define(text: str) -> dict[str, Any]:
        monkeypatch.delitem(sys.modules, "noise_by_test", raising=False)
        write_module("noise_by_test", text)
        return resolve("noise_by_test:noise", _SIDE, _SIDE)

    return define


def _all(definition: dict[str, Any], places: list[tuple[int, int, int]] = _PLACES) -> list[bytes]:
    return [augment(_IMAGE, definition, *place).tobytes() for place in places]


@pytest.mark.parametrize("draw", _DRAWS)
def test_a_custom_augmentation_is_the_same_whatever_generator_it_draws_from(
    draw: str, custom: Callable[[str], dict[str, Any]]
) -> None:
    definition = custom(_NOISE.format(_DRAWS[draw]))
    random.seed(1)
    np.random.seed(1)
    first = _all(definition)
    random.seed(2)
    np.random.seed(2)
    assert _all(definition, _PLACES[::-1])[::-1] == first
    assert len(set(first)) > len(first) // 2


def test_a_pipeline_that_draws_from_shared_generators_is_reproducible(
    albumentations: Any, custom: Callable[[str], dict[str, Any]]
) -> None:
    definition = custom(
        "import random\nimport numpy as np\nimport albumentations as A\n"
        "def shift(image, **_):\n"
        "    return image ^ np.uint8(random.randrange(256)) ^ np.uint8(np.random.randint(256))\n"
        "noise = A.Compose([A.HorizontalFlip(p=0.5), A.Lambda(image=shift, name='shift', p=1.0)])\n"
    )
    first = _all(definition)
    assert _all(definition) == first
    assert len(set(first)) > len(first) // 2


def test_noise_that_opencv_draws_is_reproducible(custom: Callable[[str], dict[str, Any]]) -> None:
    pytest.importorskip("cv2")
    text = _NOISE.format("cv2.randu(np.zeros(image.shape, np.uint8), 0, 256)")
    definition = custom(f"import cv2\n{text}")
    first = _all(definition)
    assert _all(definition) == first
    assert len(set(first)) == len(first)


def test_the_shared_generators_are_left_as_they_were(custom: Callable[[str], dict[str, Any]]) -> None:
    definition = custom(_NOISE.format(_DRAWS["both"]))
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    _all(definition)
    assert (random.random(), np.random.random()) == expected


@pytest.mark.parametrize(
    "text",
    [
        _NOISE.format("np.random.default_rng().integers(0, 256, image.shape, np.uint8)"),
        _NOISE.format("np.uint8(random.SystemRandom().randrange(256))"),
        "import itertools\ncount = itertools.count()\n"
        "def noise(image, generator):\n    return image ^ (next(count) % 256)\n",
        "import numpy as np\nown = np.random.default_rng(0)\n"
        "def noise(image, generator):\n    return image ^ own.integers(0, 256, image.shape, np.uint8)\n",
    ],
    ids=["unseeded generator", "the system's", "a count of calls", "a generator kept between calls"],
)
def test_what_makes_something_else_each_time_is_refused_at_the_start(
    text: str, custom: Callable[[str], dict[str, Any]]
) -> None:
    with pytest.raises(RecipeError, match="noise_by_test:noise returns different arrays for the same image each time"):
        custom(text)


@pytest.mark.slow
@pytest.mark.thorough
def test_torch_that_a_callable_imports_is_seeded_from_its_first_call_on(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import random\n"
        "class Generator(random.Random):\n"
        "    manual_seed, get_state, set_state = random.Random.seed, random.Random.getstate, random.Random.setstate\n"
        "default_generator = Generator()\n"
    )
    (tmp_path / "late_by_test.py").write_text(
        "import numpy as np\n"
        "def noise(image, generator):\n"
        "    import torch\n"
        "    return image ^ np.uint8(torch.default_generator.randrange(256))\n"
    )
    script = (
        "import sys\nimport numpy as np\nfrom tpucache.warmup.records.augment import augment\n"
        "from tpucache.warmup.code_digest import code_digests\n"
        "definition = {'callable': 'late_by_test:noise', **code_digests('late_by_test:noise')}\n"
        "assert 'torch' not in sys.modules\n"
        "images = [augment(np.zeros((2, 2, 3), np.uint8), definition, 0, n, 1).tobytes() for n in (0, 1, 2, 0, 1, 2)]\n"
        "assert images[:3] == images[3:], images\n"
        "assert len(set(images)) == 3\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["preset", "random"])
def test_threads_do_not_disturb_each_other(name: str, custom: Callable[[str], dict[str, Any]]) -> None:
    definition = resolve("strong", _SIDE, _SIDE) if name == "preset" else custom(_NOISE.format(_DRAWS["both"]))
    places = _PLACES * 4
    expected = _all(definition, places)
    start = threading.Barrier(4)

    def work(_: int) -> Any:
        start.wait()
        return _all(definition, places)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(work, range(4))] == [expected] * 4
    finally:
        sys.setswitchinterval(interval)
