"""Optimizers: groups of parameters and their rates, SGD and AdamW set up for XLA, and averages of the weights."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tpucache.errors import DependencyError, TrainingError, UsageError, calling
from tpucache.plugins import load_callable
from tpucache.training.schedule import Rates
from tpucache.training.settings import OPTIMIZERS

#: Key of an optimizer's group: the factor of its learning rate.
RATE_SCALE: Final = "rate_scale"

#: Running statistics of norms, which training only writes and evaluation only reads.
_RUNNING: Final = ("running_mean", "running_var", "num_batches_tracked")
_NAMED: Final = 10  # names in a message, at most

#: A function of groups of parameters and `lr` that returns an optimizer.
OptimizerMaker = Callable[..., torch.optim.Optimizer]

_DECAY: Final = "asked_weight_decay"
_RATE_ALONE: Final = "schedule_sets_rate_alone"
_LEAST: Final = 2.0**-23  # the smallest number that changes 1 in float32


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Freeze the parameters whose name, or whose module's name, fits one of the patterns.

    Returns the normalisation layers with running statistics that are frozen as a whole, and have to stay in evaluation
    mode.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if not any(_is_within(name, pattern) for name in parameters):
            tops = list(dict.fromkeys(name.partition(".")[0] for name in parameters))
            raise UsageError(
                f"--freeze {pattern} fits no parameter of the model: its modules are {', '.join(tops[:_NAMED])}"
                f"{' …' if len(tops) > _NAMED else ''}, and one of its parameters is {next(iter(parameters), 'none')}"
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
    """Yield the buffers that training steps may read: all but the running statistics of normalisation layers."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not (isinstance(module, _NormBase) and name in _RUNNING):
                yield buffer


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return the groups of an optimizer over all parameters that require gradients.

    With `layer_decay` each layer has `layer_decay` times the rate of the next layer, and the last layer has the whole
    rate (Bao et al., arXiv:2106.08254).
    """
    kept = _undecayed_names(model)
    learned = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    layers = layer_numbers(model) if layer_decay is not None else {}
    last = max(layers.values(), default=0)
    groups = []
    for layer in range(last + 1):
        members = [(name, parameter) for name, parameter in learned if layers.get(name, 0) == layer]
        scale: dict[str, Any] = {} if layer_decay is None else {RATE_SCALE: layer_decay ** (last - layer)}
        for decays in (True, False):
            chosen = [parameter for name, parameter in members if _decays(name, parameter, kept) == decays]
            if chosen:
                groups.append({"params": chosen, "weight_decay": weight_decay if decays else 0.0, **scale})
    return groups


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Return the number of each parameter's layer, from 0 at the inputs.

    A timm model's `group_matcher` defines the layers. Parameters of the model itself, such as position embeddings, are
    in the first layer.
    """
    if type(model).__module__.startswith("timm.") and callable(getattr(model, "group_matcher", None)):
        from timm.models import group_parameters

        matcher: Callable[..., Any] = model.group_matcher  # type: ignore[assignment]  # torch: may be a tensor
        with calling("timm", TrainingError, "Install another version of timm, or leave --layer-decay out"):
            layers = group_parameters(model, matcher(coarse=False), reverse=True)
        return {name: int(layer) for name, layer in layers.items()}
    names = [name for name, _ in model.named_parameters()]
    order = list(dict.fromkeys(layer for layer in map(_layer, names) if layer))
    return {name: order.index(layer) if (layer := _layer(name)) else 0 for name in names}


def _layer(name: str) -> str:
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
    return itertools.accumulate(name.split("."), "{}.{}".format)


def _is_frozen(name: str, norm: nn.Module, patterns: Sequence[str]) -> bool:
    names = [f"{name}.{parameter}" for parameter, _ in norm.named_parameters()] or [name]
    return all(any(_is_within(each, pattern) for pattern in patterns) for each in names)


def make_optimizer(
    model: nn.Module,
    kind: str | OptimizerMaker,
    lr: float,
    weight_decay: float = 0.0,
    *,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    layer_decay: float | None = None,
    fused: bool = False,
    capturable: bool = False,
) -> torch.optim.Optimizer:
    """Return SGD with Nesterov momentum, or AdamW, over the parameters that require gradients, on their device.

    If `kind` is a callable, it gets the groups and `lr`. `fused` steps run one kernel for many parameters, which torch
    has for CUDA; AdamW's count of steps is then on the device. With `capturable`, torch's other optimizers keep their
    count there, too, so that XLA compiles no further graphs. Raises UsageError for an unknown `kind`, impossible
    values, a model without parameters to train, and a callable that fails.
    """
    if isinstance(kind, str) and kind not in OPTIMIZERS:
        raise UsageError(f"there is no optimizer {kind!r}: use {', '.join(OPTIMIZERS)}")
    if not lr > 0 or not weight_decay >= 0:
        raise UsageError(
            f"the learning rate must be above 0 and the weight decay at least 0, not {lr} and {weight_decay}"
        )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError("the model has no parameter that requires gradients: there is nothing to train")
    groups = parameter_groups(model, weight_decay, layer_decay)
    optimizer: torch.optim.Optimizer
    if not isinstance(kind, str):
        more = {_RATE_ALONE: True, **({"capturable": True} if capturable and _is_capturable(kind) else {})}
        try:
            optimizer = kind([{**group, **more} for group in groups], lr=lr)
        except (UsageError, DependencyError):
            raise
        except Exception as error:  # optimizers raise any error for parameters that they do not take
            raise UsageError(
                f"the optimizer {optimizer_name(kind)} cannot be made for this model: {type(error).__name__}: {error}. "
                "Use another optimizer"
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"the optimizer is a {type(optimizer).__name__}: let your function return a torch.optim.Optimizer"
            )
        return optimizer
    is_fused = True if fused and all(map(torch.is_floating_point, parameters)) else None
    if kind == "sgd":
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=True, fused=is_fused)
    else:
        optimizer = torch.optim.AdamW(
            [{**group, _DECAY: group["weight_decay"]} for group in groups], lr=lr, betas=betas, fused=is_fused
        )
    for parameter in parameters:
        # Make the state now that the first step would make. AdamW's count is on the host, as in torch, unless fused.
        if kind == "sgd":
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        else:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            count = torch.zeros((), device=parameter.device if is_fused else "cpu")
            optimizer.state[parameter] = {"step": count, **moments}
    return optimizer


def find_optimizer(name: str) -> str | OptimizerMaker:
    """Return `name` itself if it is "sgd" or "adamw", or else the user's function or class, `module:name`."""
    if name in OPTIMIZERS:
        return name
    if ":" not in name:
        raise UsageError(
            f"there is no optimizer {name!r}: use {', '.join(OPTIMIZERS)}, or one by module:name, such as "
            "torch.optim:NAdam or timm.optim:Lamb"
        )
    return load_callable(name)


def _is_capturable(kind: OptimizerMaker) -> bool:
    """Return whether this is an optimizer of torch that can keep its count of steps on an XLA device."""
    if not isinstance(kind, type) or kind.__module__.partition(".")[0] != "torch":
        return False
    return "capturable" in inspect.signature(kind).parameters and kind is not torch.optim.Adadelta  # torch refuses it


def optimizer_name(maker: OptimizerMaker) -> str:
    made = maker.func if isinstance(maker, functools.partial) else maker
    return str(getattr(made, "__name__", "that was given"))


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer with the same number of groups, from any device; `fused` is not changed."""
    groups = [
        {**saved, **({"fused": own["fused"]} if "fused" in own else {})}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    """Let the next step use these rates, without compiling another graph; `momentum` is AdamW's first beta.

    XLA would compile another graph if a factor became 1 in float32, or if two inputs became equal. So AdamW's weight
    decay times the learning rate is at least 2^-23, and AdamW's count of steps stops when its bias correction is 1. If
    layers have rates of their own, that product is a different multiple of 2^-23 in each group.
    """
    multiple = 0
    for group in optimizer.param_groups:
        group["lr"] = rates.lr * group.get(RATE_SCALE, 1.0)
        if group.get(_RATE_ALONE):
            continue
        if "betas" not in group:
            group["momentum"] = rates.momentum
            continue
        group["betas"] = (rates.momentum, group["betas"][1])
        if group[_DECAY] and RATE_SCALE in group:
            multiple = max(multiple + 1, round(group[_DECAY] * group["lr"] / _LEAST))
            group["weight_decay"] = multiple * _LEAST / group["lr"]
        elif group[_DECAY]:
            group["weight_decay"] = max(group[_DECAY], _LEAST / group["lr"])
        if group.get("fused"):  # the count is on a GPU, which has no graphs
            continue
        last = int(math.log(_LEAST) / math.log(group["betas"][1]))
        for parameter in group["params"]:
            optimizer.state[parameter]["step"].clamp_(max=last)


def scale_gradients(parameters: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale all gradients down so that their joint norm is at most `max_norm`; return the norm before that.

    The norm is a scalar that stays on the device. Raises UsageError unless `max_norm` is above 0.
    """
    if not max_norm > 0:
        raise UsageError(f"the norm to which gradients are clipped is {max_norm}: use a number above 0")
    return nn.utils.clip_grad_norm_(parameters, max_norm)


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
