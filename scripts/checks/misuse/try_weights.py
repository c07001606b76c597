"""Weights and keywords of models."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from PIL import Image

from scripts.checks.misuse.lab import CLASSES, Lab, pixels
from scripts.checks.misuse.outcome import Outcome, correct, refused, succeeded, true
from scripts.checks.misuse.rows import row

_TRAIN = ("--backend", "torch", "--batch-size", 8, "--epochs", 1, "--model", "cnn")
_FIRST = "0.0.weight"


def grey_photos(folder: Path) -> Path:
    """Write eight grey images of each class; return their folder."""
    for number in range(8 * len(CLASSES)):
        path = folder / CLASSES[number % len(CLASSES)] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number)[..., 0]).save(path)
    return folder


@row
def weights_for_colours_in_a_run_on_grey_images(lab: Lab) -> Outcome:
    cache, colours, grey = lab.folder / "cache", lab.folder / "colours", lab.folder / "grey"
    succeeded(lab.command("train", lab.shared.cache(), "--run", colours, *_TRAIN))
    succeeded(lab.warmup(grey_photos(lab.folder / "p"), cache, "--mode", "grey"))
    words = ("--weights", colours, "--lr", 1e-9, "--optimizer", "sgd", "--weight-decay", 0)
    done = succeeded(lab.command("train", cache, "--run", grey, *_TRAIN, *words))
    true("the message names what was adapted", "adapted" in done.err and _FIRST in done.err)
    before, after = (torch.load(run / "best.pt", weights_only=True)["model"][_FIRST] for run in (colours, grey))
    gap = float((before.sum(1, keepdim=True) - after).abs().max())
    true(f"the new filters are the sums of the old ones: {gap:.1g} apart", gap < 1e-5)
    return correct("the first convolution is summed over the colours")


@row
def a_keyword_that_a_model_of_timm_does_not_take(lab: Lab) -> Outcome:
    if importlib.util.find_spec("timm") is None:
        return correct("timm is not installed: not tried")
    for keyword, *words in (("pretrained=1", "pretrained", "--weights"), ("img_size=64", "img_size", "keywords")):
        name = f"timm:resnet10t?{keyword}"
        done = lab.command("train", lab.shared.cache(), "--run", lab.folder / "run", *_TRAIN, "--model", name)
        outcome = refused(done, *words, status=2)
    return outcome
