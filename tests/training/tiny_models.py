"""Networks for tests, named as `tiny_models:name` on the command line."""

from torch import nn


def tiny(classes: int) -> nn.Module:
    """A network with everything that differs between backends when it is wrong: a convolution, BatchNorm, a mean."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, classes),
    )


def no_model(classes: int) -> str:
    """Something that is no model."""
    return "no model"
