"""Which of a model's parameters learn, how fast, and which of them decay."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tpucache.errors import UsageError

#: In a group of an optimizer, what its learning rate is multiplied by.
RATE_SCALE: Final = "rate_scale"

#: What norms add to in training and read in evaluation alone.
_RUNNING: Final = ("running_mean", "running_var", "num_batches_tracked")
_NAMED: Final = 10  # names in a message, at most


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Let parameters keep their values whose name, or that of a module they are in, fits one of the patterns.

    Patterns are those of file names: `layer[12]`, `backbone`, `*.bias`. Returns the norms with running statistics that
    are frozen as a whole: they are to stay in evaluation mode. Raises UsageError for a pattern that fits nothing, and
    when nothing is left to learn.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if not any(_is_within(name, pattern) for name in parameters):
            tops = list(dict.fromkeys(name.partition(".")[0] for name in parameters))
            raise UsageError(
                f"--freeze {pattern} fits no parameter of the model: its modules are {', '.join(tops[:_NAMED])}"
                f"{' …' if len(tops) > _NAMED else ''}, its parameters such as {next(iter(parameters), 'none')}"
            )
    for name, parameter in parameters.items():
        if any(_is_within(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError(f"--freeze {' '.join(patterns)} freezes all parameters of the model: leave some to be learned")
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and _is_frozen(name, module, patterns)
    ]


def buffers_of_steps(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers that training steps may read: all but the running statistics of norms."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not (isinstance(module, _NormBase) and name in _RUNNING):
                yield buffer


def parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float | None = None, *, respect_model: bool = True
) -> list[dict[str, Any]]:
    """Return the groups of an optimizer over all parameters that require gradients.

    Parameters of at most one dimension do not decay, nor do those that the model's `no_weight_decay()` names, such as
    position embeddings, if `respect_model`. With `layer_decay` the rate of a layer is that times the rate of the next
    one, and the last layer has the whole rate (Bao et al., arXiv:2106.08254).
    """
    kept = _undecayed_names(model) if respect_model else set()
    learned = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    layers = layer_numbers(model) if layer_decay is not None else {}
    last = max(layers.values(), default=0)
    groups = []
    for layer in range(last + 1):
        members = [(name, parameter) for name, parameter in learned if layers.get(name, 0) == layer]
        scale = {} if layer_decay is None else {RATE_SCALE: layer_decay ** (last - layer)}
        for decays in (True, False):
            chosen = [parameter for name, parameter in members if _decays(name, parameter, kept) == decays]
            if chosen:
                groups.append({"params": chosen, "weight_decay": weight_decay if decays else 0.0, **scale})
    return groups


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Return the number of the layer that each parameter is in, from 0 at the inputs, in the order of definition.

    A layer is a module up to its first number, such as `blocks.3` or `layer1.0`, or one at the top, such as `head`.
    Parameters of the model itself, such as position embeddings, are in the first layer.
    """
    names = [name for name, _ in model.named_parameters()]
    order = list(dict.fromkeys(layer for layer in map(_layer, names) if layer))
    return {name: order.index(layer) if (layer := _layer(name)) else 0 for name in names}


def _layer(name: str) -> str:
    """Return the name of a parameter's layer, nothing for a parameter of the model itself."""
    *modules, _ = name.split(".")
    within = list(itertools.takewhile(lambda part: not part.isdigit(), modules))
    return ".".join(modules[: len(within) + 1]) if len(within) < len(modules) else "".join(modules[:1])


def _undecayed_names(model: nn.Module) -> set[str]:
    names = getattr(model, "no_weight_decay", None)
    return {str(name) for name in names()} if callable(names) else set()


def _decays(name: str, parameter: nn.Parameter, kept: Collection[str]) -> bool:
    return parameter.dim() > 1 and name not in kept


def _is_within(name: str, pattern: str) -> bool:
    return any(fnmatchcase(outer, pattern) for outer in _outer_names(name))


def _outer_names(name: str) -> Iterator[str]:
    """Yield the names of the modules around a name, and the name itself."""
    return itertools.accumulate(name.split("."), "{}.{}".format)


def _is_frozen(name: str, norm: nn.Module, patterns: Sequence[str]) -> bool:
    names = [f"{name}.{parameter}" for parameter, _ in norm.named_parameters()] or [name]
    return all(any(_is_within(each, pattern) for pattern in patterns) for each in names)
