"""Generated data, networks, losses and steps of one's own, named as `tiny_tasks:name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

WORDS, LENGTH, SAMPLES = 40, 12, 200


class Generated:
    """Items made by their number alone."""

    def __init__(self, make: Callable[[np.random.Generator, int], dict[str, Any]], *classes: str) -> None:
        self._make, self.classes = make, classes

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._make(np.random.default_rng(number), number)


def texts() -> Generated:
    """Sentences of up to twelve words, which are mostly of the first half of the dictionary or of the second."""

    def make(rng: np.random.Generator, number: int) -> dict[str, Any]:
        length, label = int(rng.integers(4, LENGTH + 1)), number % 2
        halves = (rng.random(length) < 0.2) ^ label
        ids, attention = np.zeros(LENGTH, np.int64), np.zeros(LENGTH, np.uint8)
        ids[:length] = rng.integers(1, WORDS // 2, length) + halves * (WORDS // 2)
        attention[:length] = 1
        return {"ids": ids, "attention": attention, "label": label}

    return Generated(make, "first", "second")


def colours() -> Generated:
    """Images of noise around a colour, labelled by which of its channels are bright."""

    def make(rng: np.random.Generator, _number: int) -> dict[str, Any]:
        bright = rng.integers(0, 2, 3)
        image = rng.normal(60 + 120 * bright, 30, (16, 16, 3)).clip(0, 255).astype(np.uint8)
        return {"image": image, "label": bright.astype(np.float32)}

    return Generated(make, "red", "green", "blue")


def greys() -> Generated:
    """Images of noise around a grey, labelled by how bright it is and by how dark."""

    def make(rng: np.random.Generator, _number: int) -> dict[str, Any]:
        grey = rng.random()
        image = rng.normal(40 + 170 * grey, 20, (16, 16, 3)).clip(0, 255).astype(np.uint8)
        return {"image": image, "label": np.array([3 * grey, -grey], np.float32)}

    return Generated(make)


def prices() -> Generated:
    """Images of noise around a grey, labelled by a price, a temperature that follows from it, and a constant."""

    def make(rng: np.random.Generator, _number: int) -> dict[str, Any]:
        grey = rng.random()
        image = rng.normal(40 + 170 * grey, 20, (16, 16, 3)).clip(0, 255).astype(np.uint8)
        return {"image": image, "label": np.array([1e5 + 4.5e5 * grey, 0.01 * grey, 7], np.float32)}

    return Generated(make)


def squares() -> Generated:
    """A bright rectangle somewhere on a dark ground, with the mask that says where."""

    def make(rng: np.random.Generator, _number: int) -> dict[str, Any]:
        mask = np.zeros((16, 16), np.uint8)
        top, left = rng.integers(0, 8, 2)
        mask[top : top + 8, left : left + 7] = 1
        image = rng.normal(70 + 110 * mask[..., None], 25, (16, 16, 3)).clip(0, 255).astype(np.uint8)
        return {"image": image, "mask": mask}

    return Generated(make)


class Bag(nn.Module):
    """The mean of a text's word vectors, and a layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, outputs)

    def forward(self, ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        weights = attention[..., None].float()
        scores: torch.Tensor = self.head((self.words(ids) * weights).sum(1) / weights.sum(1))
        return scores


def linear(outputs: int) -> nn.Module:
    """One layer on a few means of the image."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, outputs))


def zeros(outputs: int) -> nn.Module:
    """The same layer with weights of 0."""
    model = linear(outputs)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def label_eval(_model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The labels of the batch."""
    return batch["label"]


def relative_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean relative error, which depends on the unit of the labels."""
    return ((outputs - targets) / targets).abs().mean()


def doubled_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Twice the cross-entropy."""
    return 2 * functional.cross_entropy(outputs, targets)


def doubled_step(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The same as a whole step, by the batch's targets."""
    return 2 * functional.cross_entropy(model(batch["image"]), batch["target"])


def reversed_eval(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The outputs of the classes in the other direction."""
    outputs: torch.Tensor = model(batch["image"])
    return outputs.flip(1)


def views_step(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of SimCLR, once it is certain that rows 2i and 2i + 1 are different views of one sample."""
    images, masks, labels = batch["image"], batch["mask"], batch["label"]
    assert len(images) == len(masks) == len(labels) == len(batch["target"]) == 40
    assert torch.equal(labels[0::2], labels[1::2])
    assert not torch.equal(images[0::2], images[1::2])
    bright = images.mean(1) > images.mean((1, 2, 3)).view(-1, 1, 1)
    agreement = (bright == (masks[..., 0] == 1)).float().mean()
    assert agreement > 0.95, agreement
    features = functional.normalize(model(images))
    likeness = (features @ features.T / 0.1).fill_diagonal_(-1e9)
    return functional.cross_entropy(likeness, torch.arange(40) ^ 1)


def faint_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients are less than any number that float16 has."""
    return 1e-6 * functional.cross_entropy(outputs, labels)
