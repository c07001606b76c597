"""Small reference networks, from random weights; every one takes (batch, 3, height, width) and gives class scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from tpucache.callables import load_callable
from tpucache.errors import UsageError


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a way past them (He et al., arXiv:1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = conv_bn(inputs, outputs, stride)
        self.second = conv_bn(outputs, outputs, 1)
        same = inputs == outputs and stride == 1
        self.past = nn.Identity() if same else conv_bn(inputs, outputs, stride, kernel=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(second(relu(first(x))) + past(x))."""
        inner = self.second(functional.relu(self.first(x)))
        return functional.relu(inner + self.past(x))


def conv_bn(inputs: int, outputs: int, stride: int, kernel: int = 3) -> nn.Sequential:
    """Return a convolution without bias, and its BatchNorm."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def cnn(classes: int) -> nn.Module:
    """Return four strided convolutions, 16 to 128 channels: 0.1 M parameters, for small images and quick trials."""
    layers: list[nn.Module] = []
    channels = 3
    for outputs, stride in ((16, 1), (32, 2), (64, 2), (128, 2)):
        layers += [conv_bn(channels, outputs, stride), nn.ReLU()]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def resnet18(classes: int) -> nn.Module:
    """Return the ResNet-18 of arXiv:1512.03385: 11 M parameters."""
    layers: list[nn.Module] = [conv_bn(3, 64, 2, kernel=7), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(channels, outputs, stride), ResidualBlock(outputs, outputs, 1)]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


MODELS: Final[dict[str, Callable[[int], nn.Module]]] = {"cnn": cnn, "resnet18": resnet18}


def build_model(name: str, classes: int) -> nn.Module:
    """Return a new model for this many classes: a built-in one, or what `module:callable` makes of the number.

    Raises UsageError for a name that is neither, and for a callable that makes no module.
    """
    if name not in MODELS and ":" not in name:
        raise UsageError(f"there is no model {name!r}: use {', '.join(MODELS)}, or module:callable")
    build = MODELS[name] if name in MODELS else load_callable(name)
    model = build(classes)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name!r} made a {type(model).__name__}, not a torch.nn.Module")
    return model
