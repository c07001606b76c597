"""Networks for tests, named as `tiny_models:name` on the command line."""

from torch import nn


def tiny(classes: int, channels: int = 3) -> nn.Module:
    """A network with everything that differs between backends when it is wrong: a convolution, BatchNorm, a mean."""
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, 1, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, classes),
    )


def tiny_grey(classes: int) -> nn.Module:
    """The same for images of one channel."""
    return tiny(classes, channels=1)


def layer_norm(classes: int) -> nn.Module:
    """A network whose outputs for a sample depend on no other sample of the batch."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1), nn.Flatten(), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, classes),
    )  # fmt: skip


def dropping(classes: int) -> nn.Module:
    """A network with dropout."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, classes))


def no_model(classes: int) -> str:
    """Something that is no model."""
    return "no model"
