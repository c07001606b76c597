"""Weights from elsewhere, taken over by a model as far as names and shapes agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from tpucache.errors import UsageError

Shape = tuple[int, ...]

#: What wrappers of models put before the names of their weights: DataParallel, torch.compile, Lightning and others.
_PREFIXES: Final = ("module.", "_orig_mod.", "model.", "net.", "backbone.")
_NAMED: Final = 5  # tensors in a message, at most


@dataclass(frozen=True)
class MatchedWeights:
    """What a model has taken over, by the names of its own tensors.

    `matched` are as in the file; `resized` have another shape there (name, shape in the model, shape in the file) and
    keep their new values, as those do that are `missing` there. `unused` are in the file only.
    """

    matched: Sequence[str]
    resized: Sequence[tuple[str, Shape, Shape]]
    missing: Sequence[str]
    unused: Sequence[str]

    def __str__(self) -> str:
        total = len(self.matched) + len(self.resized) + len(self.missing)
        resized = [f"{name} {ours} where the weights have {theirs}" for name, ours, theirs in self.resized]
        parts = (
            ("created anew, as the sizes differ: ", resized),
            ("created anew, as the weights lack them: ", self.missing),
            ("not in the model: ", self.unused),
        )
        listed = "".join(f"; {text}{_listed(names)}" for text, names in parts if names)
        return f"{len(self.matched):,} of the model's {total:,} tensors are taken over{listed}"


def load_matching(model: nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> MatchedWeights:
    """Give a model on the host all tensors that it has by the same name and shape, and return which these are.

    Prefixes that wrappers add to the names make no difference. Raises UsageError, naming the `source`, when no
    parameter matches or one that does is not finite.
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
    bad = [name for name in parameters & {*matched} if not bool(matched[name].isfinite().all())]
    if bad:
        raise UsageError(f"{source} has values that are not finite, such as in {min(bad)}: its training had diverged")
    model.load_state_dict(matched, strict=False)
    resized = [name for name in own if name in renamed and name not in matched]
    return MatchedWeights(
        matched=[name for name in own if name in matched],
        resized=[(name, tuple(own[name].shape), tuple(renamed[name].shape)) for name in resized],
        missing=[name for name in own if name not in renamed],
        unused=[name for name in renamed if name not in own],
    )


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
