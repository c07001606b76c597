"""Exponential moving average of a model's weights, which often predicts better than the model itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from tpucache.errors import TrainingError, UsageError

_STEPS: Final = "steps"
_AVERAGE: Final = "average"


class Ema:
    """Exponential moving average of a model's parameters and floating-point buffers, on the model's device.

    `update` after a step computes average = decay * average + (1 - decay) * model. The decay warms up: it is min(decay,
    (1 + t) / (10 + t)) in update t = 1, 2, …. Integer buffers are copied. The count of updates is a tensor on the
    device, so that an update is part of the step's graph; torch's AveragedModel reads its count back in every update.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        """Begin with the weights of a model, which is on its device already.

        Raises UsageError unless the decay is between 0 and 1.
        """
        if not 0 < decay < 1:
            raise UsageError(f"the decay of a moving average lies between 0 and 1, not at {decay}")
        self._model = model
        self._average = {name: _like(tensor) for name, tensor in _tensors(model).items()}
        self._names: dict[torch.dtype, list[str]] = {}
        for name, tensor in self._average.items():
            self._names.setdefault(tensor.dtype, []).append(name)
        device = next(iter(self._average.values())).device
        self._steps = torch.zeros(()).to(device)
        # A tensor, because XLA merges equal Python numbers: a momentum equal to the decay would make another graph.
        self._decay = torch.tensor(decay).to(device)

    @torch.no_grad()
    def update(self) -> None:
        """Add the model's weights to the averages. Call this after each optimizer step, in the same graph."""
        self._steps += 1
        rest = 1 - torch.minimum((1 + self._steps) / (10 + self._steps), self._decay)
        own = _tensors(self._model)
        for dtype, names in self._names.items():
            tensors, averages = [own[name] for name in names], [self._average[name] for name in names]
            if not dtype.is_floating_point:
                torch._foreach_copy_(averages, tensors)
                continue
            # Three operations for all tensors instead of three for each: a deep model has hundreds.
            changes = torch._foreach_sub(tensors, averages)
            torch._foreach_mul_(changes, rest.to(dtype))
            torch._foreach_add_(averages, changes)

    @contextlib.contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Return a context in which the model has the averaged weights; afterwards it has its own again."""
        averages = {id(tensor): self._average[name] for name, tensor in _tensors(self._model).items()}
        # Replace the tensor, not its values: otherwise XLA would compile the next step again.
        places = [
            (module, name, tensor)
            for module in self._model.modules()
            for own in (module.named_parameters, module.named_buffers)
            for name, tensor in own(recurse=False)
        ]
        for module, name, tensor in places:
            setattr(module, name, averages[id(tensor)])
        try:
            yield self._model
        finally:
            for module, name, tensor in places:
                setattr(module, name, tensor)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the averages by name, as tensors."""
        return {_STEPS: self._steps, _AVERAGE: dict(self._average)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned for the same model.

        Raises TrainingError for a state without averages, and for the state of another model.
        """
        average = state.get(_AVERAGE, {})
        shapes = {name: tensor.shape for name, tensor in average.items()}
        if shapes != {name: tensor.shape for name, tensor in self._average.items()} or _STEPS not in state:
            raise TrainingError(
                "the checkpoint has no moving average of this model's weights: resume with the same model and --ema"
            )
        self._steps.copy_(state[_STEPS])
        for name, tensor in average.items():
            self._average[name].copy_(tensor)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _like(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy
