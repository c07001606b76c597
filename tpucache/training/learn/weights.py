"""Weights from elsewhere, taken over by a model as far as names and shapes agree, or can be made to."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from tpucache.errors import UsageError

Shape = tuple[int, ...]

#: What wrappers of models put before the names of their weights: DataParallel, torch.compile, Lightning and others.
_PREFIXES: Final = ("module.", "_orig_mod.", "model.", "net.", "backbone.")
_NAMED: Final = 5  # tensors in a message, at most
#: Images for which networks are trained have so many channels; other convolutions of these are not told from patches.
_IMAGE_CHANNELS: Final = (1, 3, 4)


@dataclass(frozen=True)
class MatchedWeights:
    """What a model has taken over, by the names of its own tensors.

    `matched` are as in the file. `adapted` have another shape there (name, shape in the model, shape in the file), and
    were made to fit; `resized` have one that cannot be made to fit, and keep their new values, as those do that are
    `missing` there. `unused` are in the file only. `trouble` says why timm's own adaptation failed, if it did.
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
            ("timm could not adapt them: ", [self.trouble] if self.trouble else []),
        )
        listed = "".join(f"; {text}{_listed(names)}" for text, names in parts if names)
        return f"{taken:,} of the model's {total:,} tensors are taken over{listed}"


def load_matching(model: nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> MatchedWeights:
    """Give a model on the host all tensors that it has by the same name and shape, and return which these are.

    Prefixes that wrappers add to the names make no difference. The first convolution is adapted to another number of
    channels, and what timm adapts in a model of its own, such as position embeddings, to another size. Raises
    UsageError, naming the `source`, when no parameter matches or one that does is not finite.
    """
    own = model.state_dict()
    parameters = {name for name, _ in model.named_parameters()}
    renamed = max(_renamings(model, weights), key=lambda names: _count_matches(own, names))
    matched = {name: tensor for name, tensor in renamed.items() if _fits(own, name, tensor)}
    if not parameters & {*matched}:
        raise UsageError(
            f"{source} has no weights for this model: the model has {_listed([*own])}, {source} has "
            f"{_listed([*weights])}. Give the weights of the same --model"
        )
    others = {name: tensor for name, tensor in renamed.items() if name in own and name not in matched}
    resampled, trouble = _resampled_by_timm(model, renamed) if others else ({}, "")
    others = {name: resampled.get(name, tensor) for name, tensor in others.items()}
    others |= _with_channels(model, own, others)
    adapted = {name: tensor for name, tensor in others.items() if _fits(own, name, tensor)}
    taken = matched | adapted
    bad = [name for name in parameters & {*taken} if not bool(taken[name].isfinite().all())]
    if bad:
        raise UsageError(f"{source} has values that are not finite, such as in {min(bad)}: its training had diverged")
    model.load_state_dict(taken, strict=False)
    shapes = {name: (name, tuple(own[name].shape), tuple(renamed[name].shape)) for name in own if name in others}
    return MatchedWeights(
        matched=[name for name in own if name in matched],
        resized=[shapes[name] for name in shapes if name not in adapted],
        missing=[name for name in own if name not in renamed],
        unused=[name for name in renamed if name not in own],
        adapted=[shapes[name] for name in shapes if name in adapted],
        trouble=trouble,
    )


def adapt_channels(weight: torch.Tensor, channels: int) -> torch.Tensor:
    """Return a convolution's weight (outputs, inputs, height, width) for this many input channels, as timm adapts it.

    For one channel it is summed, so that a grey image gives what its copies in all channels gave. For more, the
    channels are repeated in their order and scaled by the ratio of the numbers.
    """
    before = weight.shape[1]
    if channels == 1:
        return weight.float().sum(1, keepdim=True).to(weight.dtype)
    repeated = weight.float().repeat(1, math.ceil(channels / before), 1, 1)[:, :channels]
    return (repeated * (before / channels)).to(weight.dtype)


def _with_channels(
    model: nn.Module, own: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return, by name, those of the `others` that are weights of a first convolution, for the model's channels."""
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
    """Return the names of the weights that see the images: those that timm names, or that of the first convolution."""
    convolutions = {
        f"{name}.weight".lstrip("."): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d) and module.groups == 1
    }
    named = getattr(model, "pretrained_cfg", {}).get("first_conv") if _is_of_timm(model) else None
    wanted = [f"{name}.weight" for name in ([named] if isinstance(named, str) else named or ())]
    return [name for name in wanted if name in convolutions] or [*convolutions][:1]


def _resampled_by_timm(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    """Return weights as timm makes them fit a model of its own, and what went wrong; nothing of any other model."""
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None) if _is_of_timm(model) else None
    if adapt is None:
        return {}, ""
    try:
        return dict(adapt(dict(weights), model)), ""
    except Exception as error:  # noqa: BLE001  # timm raises whatever it raises, and the rest fits without it
        return {}, f"{type(error).__name__}: {' '.join(str(error).split())}"


def _is_of_timm(model: nn.Module) -> bool:
    return type(model).__module__.startswith("timm.")


def _renamings(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield weights as they are named, without one or two prefixes of wrappers, and with one that the model has."""
    yield dict(weights)
    for outer in _PREFIXES:
        without = {name.removeprefix(outer): tensor for name, tensor in weights.items()}
        if without.keys() != weights.keys():
            yield without
            for inner in _PREFIXES:
                yield {name.removeprefix(inner): tensor for name, tensor in without.items()}
    for child, _ in model.named_children():
        yield {f"{child}.{name}": tensor for name, tensor in weights.items()}


def _count_matches(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> int:
    return sum(_fits(own, name, tensor) for name, tensor in weights.items())


def _fits(own: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> bool:
    return name in own and own[name].shape == tensor.shape


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")
