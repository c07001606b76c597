"""Every example in docs/integrations runs unchanged, and sees every image that it should."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "docs" / "integrations"
WHOLE, DROPPED, FOLDS = 2 * 150, 2 * (150 // 32 * 32), 5 * 150  # two epochs; without the last batch; five folds
EXAMPLES = {
    "with_dataloader.py": ("torch", WHOLE),
    "with_lightning.py": ("lightning", DROPPED),
    "with_trainer.py": ("transformers", DROPPED),
    "with_accelerate.py": ("accelerate", DROPPED),
    "with_keras.py": ("keras", DROPPED),
    "with_grain.py": ("grain", WHOLE),
    "with_timm.py": ("timm", DROPPED),
    "with_torchvision.py": ("torchvision", DROPPED),
    "with_fastai.py": ("fastai", DROPPED),
    "with_sklearn.py": ("sklearn", FOLDS),
    "with_jax.py": ("jax", DROPPED),
    "with_flax.py": ("flax", DROPPED),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_sees_every_image(cache, run_example, needs, name):
    module, images = EXAMPLES[name]
    needs(module)
    assert run_example(name, cache) == images


@pytest.mark.thorough
def test_workers_may_be_spawned(cache, run_example):
    assert run_example("with_dataloader.py", cache, "spawn") == WHOLE


def test_no_example_is_left_out():
    assert sorted(EXAMPLES) == sorted(path.name for path in FOLDER.glob("*.py"))
