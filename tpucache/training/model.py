"""Models by name or from functions, and how weights from files are fitted into them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from tpucache.errors import DependencyError, TpucacheError, TrainingError, UsageError, calling
from tpucache.plugins import load_callable
from tpucache.store.fields import IMAGE, Field
from tpucache.training.user_code import describe_error

_TIMM: Final = "timm:"
_OBJECT: Final = "object:"
#: Keywords of timm that cannot be given: they load weights, follow from the cache, or make no classifier.
_NOT_GIVEN: Final = ("cache_dir", "checkpoint_path", "device", "dtype", "features_only", "in_chans", "num_classes")
_BOOLEANS: Final = {"true": True, "false": False}


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection (He et al., arXiv:1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = conv_bn(inputs, outputs, stride)
        self.second = conv_bn(outputs, outputs, 1)
        same = inputs == outputs and stride == 1
        self.past = nn.Identity() if same else conv_bn(inputs, outputs, stride, kernel=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.second(functional.relu(self.first(x)))
        return functional.relu(inner + self.past(x))


class UNet(nn.Module):
    """A U-Net: an encoder and a decoder with skip connections (Ronneberger et al., arXiv:1505.04597)."""

    def __init__(self, outputs: int, channels: tuple[int, ...], inputs: int = 3) -> None:
        super().__init__()
        sides = list(zip((inputs, *channels), channels, strict=False))
        self.down = nn.ModuleList(_two_convs(inputs, width) for inputs, width in sides)
        self.up = nn.ModuleList(_two_convs(inputs + width, inputs) for inputs, width in reversed(sides[1:]))
        self.head = nn.Conv2d(channels[0], outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for level, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2, ceil_mode=True) if level else x)
            seen.append(x)
        seen.pop()
        for block in self.up:
            skip = seen.pop()
            larger = functional.interpolate(x, scale_factor=2.0)[..., : skip.shape[2], : skip.shape[3]]
            x = block(torch.cat([skip, larger], 1))
        scores: torch.Tensor = self.head(x)
        return scores


def conv_bn(inputs: int, outputs: int, stride: int, kernel: int = 3) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def cnn(outputs: int, inputs: int = 3) -> nn.Module:
    """Return a CNN of four convolutions, 16 to 128 channels, for small images and quick trials: 0.1 M parameters."""
    layers: list[nn.Module] = []
    channels = inputs
    for width, stride in ((16, 1), (32, 2), (64, 2), (128, 2)):
        layers += [conv_bn(channels, width, stride), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs))


def resnet9(outputs: int, inputs: int = 3) -> nn.Module:
    """D. Page's network (2018) at half the width, for images of 64 to 96 pixels on a small CPU: 1.9 M parameters."""
    layers: list[nn.Module] = [conv_bn(inputs, 32, 2), nn.ReLU()]
    channels = 32
    for width in (64, 128, 256):
        block = ResidualBlock(width, width, 1)
        layers += [conv_bn(channels, width, 1), nn.MaxPool2d(2, ceil_mode=True), nn.ReLU(), block]
        channels = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, ResidualBlock):
            nn.init.zeros_(module.second.get_parameter("1.weight"))
    return model


def resnet18(outputs: int, inputs: int = 3) -> nn.Module:
    """Return the ResNet-18 of arXiv:1512.03385: 11 M parameters."""
    layers: list[nn.Module] = [conv_bn(inputs, 64, 2, kernel=7), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(channels, width, stride), ResidualBlock(width, width, 1)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs))


def unet(outputs: int, inputs: int = 3) -> nn.Module:
    """Return a U-Net of four levels, 16 to 128 channels, that scores each class in each pixel: 0.5 M parameters."""
    return UNet(outputs, (16, 32, 64, 128), inputs)


#: Models with outputs (batch, outputs).
MODELS: Final[dict[str, Callable[[int, int], nn.Module]]] = {"cnn": cnn, "resnet9": resnet9, "resnet18": resnet18}
#: Models with outputs (batch, outputs, height, width), for masks.
DENSE_MODELS: Final[dict[str, Callable[[int, int], nn.Module]]] = {"unet": unet}


def is_user_code(name: str) -> bool:
    return ":" in name and not name.startswith((_TIMM, _OBJECT))


def is_made_here(name: str) -> bool:
    return ":" not in name or name.startswith(_TIMM)


def channels_of(fields: Iterable[Field]) -> int:
    return next((field.shape[2] for field in fields if field.name == IMAGE), 3)


def build_model(
    name: str, outputs: int, channels: int = 3, columns: int = 0, build: Callable[..., nn.Module] | None = None
) -> nn.Module:
    """Return a new model with this number of outputs: built in, `timm:NAME`, or from `module:callable`.

    The name of a timm model may have keywords, `timm:NAME?drop_path_rate=0.1&img_size=256`: numbers, booleans and
    words. Built-in models and those of timm take images of `channels` channels. A callable is called with the number of
    outputs, and with `columns`, the number of input columns, unless it is 0. `build` is such a callable; if it is
    given, `name` is not used.

    Raises UsageError for an unknown name or keyword, and for a named callable that fails or returns no module;
    DependencyError for a timm model without timm.
    """
    if build is not None:
        return build(outputs, columns) if columns else build(outputs)
    built_in = MODELS | DENSE_MODELS
    if name.startswith(_OBJECT):
        raise UsageError(
            f"the model {name.removeprefix(_OBJECT)} was given as an object, and cannot be made again by its name: "
            "train with a function that can be imported, module:callable, to predict from the run's folder"
        )
    if columns and (name.startswith(_TIMM) or name in built_in):
        raise UsageError(
            f"the model {name!r} takes images alone: for --inputs, give a model of your own (--model module:callable) "
            "whose forward takes images and columns"
        )
    if name.startswith(_TIMM):
        return _timm_model(name.removeprefix(_TIMM), outputs, channels)
    if name not in built_in and ":" not in name:
        raise UsageError(f"there is no model {name!r}: use {', '.join(built_in)}, timm:NAME or module:callable")
    if name in built_in:
        return built_in[name](outputs, channels)
    try:
        model = load_callable(name)(outputs, columns) if columns else load_callable(name)(outputs)
    except TpucacheError:
        raise
    except Exception as error:  # a user's code raises any error
        raise UsageError(f"the model {name!r} cannot be made: {describe_error(error)}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model {name!r} is a {type(model).__name__}: let the function return a torch.nn.Module")
    return model


def timm_name(model: str) -> str | None:
    return model.removeprefix(_TIMM).partition("?")[0] if model.startswith(_TIMM) else None


def import_timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise DependencyError(f"timm cannot be imported: {error}. Run `pip install timm`") from error
    return timm


def _timm_model(text: str, outputs: int, channels: int) -> nn.Module:
    timm = import_timm()
    name, _, query = text.partition("?")
    with calling("timm", TrainingError, "Install another version of timm, or choose another model"):
        if not timm.is_model(name):
            close = ", ".join(timm.list_models(f"*{name}*")[:5])
            raise UsageError(f"timm has no model {name!r}" + (f": did you mean {close}?" if close else ""))
    keywords = _keywords(text, query) if "?" in text else {}
    options = keywords if channels == 3 else {**keywords, "in_chans": channels}
    given = f" with {', '.join(f'{key}={value!r}' for key, value in options.items())}" if options else ""
    advice = f"{name} cannot be made{given}: use {'keywords that this model has' if given else 'another model'}"
    with calling("timm", UsageError, advice):
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=outputs, **options)
    return model


def _keywords(text: str, query: str) -> dict[str, bool | int | float | str]:
    found: dict[str, bool | int | float | str] = {}
    for part in query.split("&"):
        key, _, value = part.partition("=")
        if not key.isidentifier() or not value or key in found:
            raise UsageError(
                f"the model timm:{text} has {part!r}, which is no keyword with a value, or repeats a keyword: write it "
                "as in timm:NAME?drop_path_rate=0.1&img_size=256"
            )
        if key in _NOT_GIVEN or key.startswith("pretrained"):
            raise UsageError(
                f"{key} of timm:{text} cannot be given: classes and channels follow from the cache, and weights are "
                "given by --weights"
            )
        found[key] = _plain_value(text, key, value)
    return found


def _plain_value(text: str, key: str, value: str) -> bool | int | float | str:
    if value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    try:
        plain = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        plain = value if value.replace(".", "_").isidentifier() else None
    if not isinstance(plain, (bool, int, float, str)):
        raise UsageError(f"{key}={value} of timm:{text} is no plain value: give a number, True, False or a word")
    return plain


def _two_convs(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(conv_bn(inputs, outputs, 1), nn.ReLU(), conv_bn(outputs, outputs, 1), nn.ReLU())
