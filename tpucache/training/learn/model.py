"""Models by name or from functions, and how weights from files are fitted into them."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from tpucache.errors import DependencyError, TpucacheError, TrainingError, UsageError, calling
from tpucache.plugins import load_callable
from tpucache.store.fields import IMAGE, Field
from tpucache.training.learn.user_code import describe_error

_TIMM: Final = "timm:"
_OBJECT: Final = "object:"
#: Keywords of timm that cannot be given: they load weights, follow from the cache, or make no classifier.
_NOT_GIVEN: Final = ("cache_dir", "checkpoint_path", "device", "dtype", "features_only", "in_chans", "num_classes")
_BOOLEANS: Final = {"true": True, "false": False}

Shape = tuple[int, ...]
Weights = Mapping[str, torch.Tensor]

#: Prefixes of weights' names from wrappers of models: DataParallel, torch.compile, Lightning and others.
_PREFIXES: Final = ("module.", "_orig_mod.", "model.", "net.", "backbone.")
_NAMED: Final = 5  # tensors in a message, at most
#: Numbers of channels of images. A first convolution with another number is not adapted: it may work on patches.
_IMAGE_CHANNELS: Final = (1, 3, 4)

#: Names of torchvision and timm for the parts of a ResNet-18 and of its blocks, and the names in our `resnet18`.
_RESNET_PARTS: Final = {"conv1": "0.0", "bn1": "0.1", "fc": "13"}
_BLOCK_PARTS: Final = {
    "conv1": "first.0", "bn1": "first.1", "conv2": "second.0", "bn2": "second.1",
    "downsample.0": "past.0", "downsample.1": "past.1",
}  # fmt: skip
_BLOCK: Final = re.compile(r"layer([1-4])\.([01])\.(.+)")


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection (He et al., arXiv:1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = conv_bn(inputs, outputs, stride)
        self.second = conv_bn(outputs, outputs, 1)
        same = inputs == outputs and stride == 1
        self.past = nn.Identity() if same else conv_bn(inputs, outputs, stride, kernel=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(second(relu(first(x))) + past(x)), where `past` is the skip connection."""
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
        """Return scores for each class and pixel: (batch, outputs, height, width), for sides of any length."""
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
    """Return a convolution without bias, and its BatchNorm."""
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
    """Return a ResNet-9 for images of 64 to 96 pixels on a small CPU: 1.9 M parameters.

    D. Page's network ("How to train your ResNet", 2018) has ever wider convolutions, pooling, and residual blocks. Here
    the first convolution is strided, and there are half as many channels. Each of the other three convolutions is
    followed by a residual block that begins as the identity (Goyal et al., arXiv:1706.02677).
    """
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
    """Return whether a model's name is `module:callable`, whose module has to be imported."""
    return ":" in name and not name.startswith((_TIMM, _OBJECT))


def is_made_here(name: str) -> bool:
    """Return whether a model's name is built in or timm's, so that making it calls no code of the user."""
    return ":" not in name or name.startswith(_TIMM)


def channels_of(fields: Iterable[Field]) -> int:
    """Return the number of channels of the images in records with these fields; 3 without an image."""
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
    """Return timm's name of a model `timm:NAME` or `timm:NAME?keywords`; None for other models."""
    return model.removeprefix(_TIMM).partition("?")[0] if model.startswith(_TIMM) else None


def import_timm() -> Any:
    """Import timm and return it. Raises DependencyError."""
    try:
        import timm
    except ImportError as error:
        raise DependencyError(f"timm cannot be imported: {error}. Run `pip install timm`") from error
    return timm


def _timm_model(text: str, outputs: int, channels: int) -> nn.Module:
    """Return timm's model for `text`, its name and keywords, such as `NAME?drop_rate=0.1`."""
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
    """Return the keywords in `query`, such as `key=value&key=value`.

    Raises UsageError for any other text; the message names the model, `text`.
    """
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
    """Return the value of a keyword: a number, a boolean, a word, or text in quotes.

    Raises UsageError for other values; the message names the `key` and the model, `text`.
    """
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


@dataclass(frozen=True)
class MatchedWeights:
    """Which of a file's weights a model has taken, by the names of the model's tensors.

    `matched` tensors have the same shape in the file. `adapted` tensors (name, shape in the model, shape in the file)
    had another shape and were made to fit. `resized` tensors, listed in the same way, cannot be made to fit, and
    `missing` tensors are not in the file: both keep the model's new values. `unused` tensors are only in the file.
    `trouble` is the error of timm's own adaptation, if any.
    """

    matched: Sequence[str]
    resized: Sequence[tuple[str, Shape, Shape]]
    missing: Sequence[str]
    unused: Sequence[str]
    adapted: Sequence[tuple[str, Shape, Shape]] = ()
    trouble: str = ""

    def __str__(self) -> str:
        taken = len(self.matched) + len(self.adapted)
        total = taken + len(self.resized) + len(self.missing)
        adapted = [f"{name} {ours} from {theirs}" for name, ours, theirs in self.adapted]
        resized = [f"{name} {ours} where the weights have {theirs}" for name, ours, theirs in self.resized]
        parts = (
            ("adapted to the model's image size or channels: ", adapted),
            ("created anew, as the sizes differ: ", resized),
            ("created anew, as the weights lack them: ", self.missing),
            ("not in the model: ", self.unused),
            ("timm could not adapt the weights: ", [self.trouble] if self.trouble else []),
        )
        listed = "".join(f"; {text}{_listed(names)}" for text, names in parts if names)
        return f"{taken:,} of the model's {total:,} tensors are taken over{listed}"


def load_matching(model: nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> MatchedWeights:
    """Load into a model, on the host, all weights that fit by name and shape; return which weights these are.

    Names may have prefixes of wrappers, such as `module.`. The first convolution is adapted to another number of
    channels. Weights for a model of timm are adapted by timm, which knows the original authors' names and resizes
    position embeddings. Raises UsageError when no parameter matches or a matching parameter is not finite; the message
    names the `source`.
    """
    own = model.state_dict()
    parameters = {name for name, _ in model.named_parameters()}
    given = max(_renamings(model, weights), key=lambda names: _count_matches(own, names))
    renamed, trouble = _adapted_by_timm(model, own, given, weights)
    matched = {name: tensor for name, tensor in renamed.items() if _fits(own, name, tensor)}
    if not parameters & {*matched}:
        raise UsageError(
            f"{source} has no weights for this model: the model has {_listed([*own])}, {source} has "
            f"{_listed([*weights])}. Give the weights of the same --model"
        )
    before = {name: tuple(given.get(name, tensor).shape) for name, tensor in renamed.items()}
    resampled = {name: matched.pop(name) for name in [*matched] if before[name] != tuple(own[name].shape)}
    others = {name: tensor for name, tensor in renamed.items() if name in own and name not in matched}
    others |= resampled | _with_channels(model, own, others)
    adapted = {name: tensor for name, tensor in others.items() if _fits(own, name, tensor)}
    taken = matched | adapted
    bad = [name for name in parameters & {*taken} if not bool(taken[name].isfinite().all())]
    if bad:
        raise UsageError(f"{source} has values that are not finite, such as in {min(bad)}: give other weights")
    model.load_state_dict(taken, strict=False)
    shapes = {name: (name, tuple(own[name].shape), before[name]) for name in own if name in others}
    return MatchedWeights(
        matched=[name for name in own if name in matched],
        resized=[shapes[name] for name in shapes if name not in adapted],
        missing=[name for name in own if name not in renamed],
        unused=[name for name in renamed if name not in own],
        adapted=[shapes[name] for name in shapes if name in adapted],
        trouble=trouble,
    )


def adapt_channels(weight: torch.Tensor, channels: int) -> torch.Tensor:
    """Return a convolution's weight (outputs, inputs, height, width) for this number of input channels, as timm does.

    For one channel the inputs are summed: a grey image then gives the outputs that its copy in each channel gave
    before. For other numbers, the inputs are repeated in order and multiplied by inputs / `channels`.
    """
    before = weight.shape[1]
    if channels == 1:
        return weight.float().sum(1, keepdim=True).to(weight.dtype)
    repeated = weight.float().repeat(1, math.ceil(channels / before), 1, 1)[:, :channels]
    return (repeated * (before / channels)).to(weight.dtype)


def _with_channels(
    model: nn.Module, own: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return, by name, the weights of first convolutions, adapted to the model's number of channels.

    `others` are the weights that have a name of the model's but another shape.
    """
    found = {}
    for name in _first_convolutions(model):
        weight = others.get(name)
        if weight is None or weight.dim() != 4 or weight.shape[1] not in _IMAGE_CHANNELS:
            continue
        outputs, channels, *sides = own[name].shape
        if (weight.shape[0], *weight.shape[2:]) == (outputs, *sides) and weight.shape[1] != channels:
            found[name] = adapt_channels(weight, channels)
    return found


def _first_convolutions(model: nn.Module) -> Iterable[str]:
    """Return the names of the weights that take the images: those that timm names, or the first convolution's."""
    convolutions = {
        f"{name}.weight".lstrip("."): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and module.groups == 1
    }
    named = getattr(model, "pretrained_cfg", {}).get("first_conv") if _is_of_timm(model) else None
    wanted = [f"{name}.weight" for name in ([named] if isinstance(named, str) else named or ())]
    return [name for name in wanted if name in convolutions] or [*convolutions][:1]


def _adapted_by_timm(
    model: nn.Module, own: Weights, given: Weights, original: Weights
) -> tuple[dict[str, torch.Tensor], str]:
    """Return a file's weights as timm adapts them to its model, and timm's error if it adapts none, or else "".

    Weights for a model that is not timm's are returned unchanged. `own` are the model's weights. `original` has the
    names of the file, which timm may know; `given` is without known prefixes.
    """
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None) if _is_of_timm(model) else None
    if adapt is None:
        return dict(given), ""
    adapted, trouble = [], ""
    for weights in (given, original):
        try:
            adapted.append(dict(adapt(dict(weights), model)))
        except Exception as error:  # noqa: BLE001  # timm raises any error, and other weights fit without it
            trouble = trouble or f"{type(error).__name__}: {' '.join(str(error).split())}"
    best = max([*adapted, dict(given)], key=lambda weights: len(own.keys() & weights.keys()))
    return best, trouble if not adapted else ""


def _is_of_timm(model: nn.Module) -> bool:
    return type(model).__module__.startswith("timm.")


def _renamings(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights under several choices of names. One choice may be the model's.

    The choices are the given names; the names without one or two known prefixes; the names with the name of a child of
    the model in front, such as `backbone.`; and `resnet18`'s names in place of torchvision's or timm's.
    """
    yield dict(weights)
    for outer in _PREFIXES:
        without = {name.removeprefix(outer): tensor for name, tensor in weights.items()}
        if without.keys() != weights.keys():
            yield without
            for inner in _PREFIXES:
                yield {name.removeprefix(inner): tensor for name, tensor in without.items()}
    for child, _ in model.named_children():
        yield {f"{child}.{name}": tensor for name, tensor in weights.items()}
    for prefix in ("", *_PREFIXES):
        if f"{prefix}layer1.0.conv1.weight" in weights:
            yield {_resnet_name(name.removeprefix(prefix)): tensor for name, tensor in weights.items()}


def _resnet_name(name: str) -> str:
    """Return `resnet18`'s name for a ResNet's tensor of torchvision or timm; other names unchanged."""
    part, _, kind = name.rpartition(".")
    if found := _BLOCK.fullmatch(part):
        layer, block, inner = found.groups()
        return f"{1 + 2 * int(layer) + int(block)}.{_BLOCK_PARTS.get(inner, inner)}.{kind}"
    return f"{_RESNET_PARTS.get(part, part)}.{kind}"


def _count_matches(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> int:
    return sum(_fits(own, name, tensor) for name, tensor in weights.items())


def _fits(own: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> bool:
    return name in own and own[name].shape == tensor.shape


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")
