"""Weights and keywords of models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lab import CLASSES, pixels
from PIL import Image
from refusals import assert_refused, succeeded

_TRAIN = ("--backend", "torch", "--batch-size", 8, "--epochs", 1, "--model", "cnn")
_FIRST = "0.0.weight"


def grey_photos(folder: Path) -> Path:
    """Write eight grey images of each class; return their folder."""
    for number in range(8 * len(CLASSES)):
        path = folder / CLASSES[number % len(CLASSES)] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number)[..., 0]).save(path)
    return folder


def test_weights_for_colours_in_a_run_on_grey_images(lab, caplog):
    cache, colours, grey = lab.folder / "cache", lab.folder / "colours", lab.folder / "grey"
    succeeded(lab.command("train", lab.shared.cache, "--run", colours, *_TRAIN))
    succeeded(lab.warmup(grey_photos(lab.folder / "p"), cache, "--mode", "grey"))
    words = ("--weights", colours, "--lr", 1e-9, "--optimizer", "sgd", "--weight-decay", 0)
    said = succeeded(lab.command("train", cache, "--run", grey, *_TRAIN, *words)).err + caplog.text
    assert "adapted" in said
    assert _FIRST in said
    before, after = (torch.load(run / "best.pt", weights_only=True)["model"][_FIRST] for run in (colours, grey))
    gap = float((before.sum(1, keepdim=True) - after).abs().max())
    assert gap < 1e-5, f"the new filters are the sums of the old ones: {gap:.1g} apart"


def test_a_keyword_that_a_model_of_timm_does_not_take(lab):
    pytest.importorskip("timm", reason="needs timm: `python -m scripts.checks integrations`")
    for keyword, *words in (("pretrained=1", "pretrained", "--weights"), ("img_size=64", "img_size", "keywords")):
        name = f"timm:resnet10t?{keyword}"
        done = lab.command("train", lab.shared.cache, "--run", lab.folder / "run", *_TRAIN, "--model", name)
        assert_refused(done, *words, status=2)
