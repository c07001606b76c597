"""Models, losses and steps that fail in ways people's do, named as `failing_code:name`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def make_nothing(outputs):
    raise KeyError("no weights for this")


class Forgetful(nn.Module):
    """A model that fails in training alone."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, outputs)

    def forward(self, images):
        if self.training:
            return self.head(images)  # not pooled: torch raises
        return self.head(images.mean((2, 3)))


class Fixed(nn.Module):
    """A model without parameters."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, images):
        return images.mean((2, 3))[:, :1].expand(-1, self.outputs)


class Bounded(nn.Module):
    """A model with an infinite buffer, which is meant."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, outputs)
        self.register_buffer("bound", torch.tensor(float("inf")))

    def forward(self, images):
        return self.head(images.mean((2, 3))).minimum(self.bound)


def failing_loss(outputs, targets):
    raise ZeroDivisionError("nobody was there")


def unreduced_loss(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


def whole_number_loss(outputs, targets):
    return outputs.argmax(1).sum()


def detached_loss(outputs, targets):
    return functional.cross_entropy(outputs, targets).detach()


def item_loss(outputs, targets):
    return functional.cross_entropy(outputs, targets).item()


def failing_step(model, batch):
    return model(batch["picture"]).mean()


def nothing_step(model, batch):
    model(batch["image"])


def failing_eval(model, batch):
    return model(batch["image"]).reshape(7, 13)


def narrow_eval(model, batch):
    return model(batch["image"])[:, :1]


def number_eval(model, batch):
    return functional.one_hot(model(batch["image"]).argmax(1), 4)


def dense(outputs):
    """One 1x1 convolution: a score a class and pixel."""
    return nn.Conv2d(3, outputs, 1)


def seven(outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 7))


def flat(outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(99, outputs))
