"""SGD and AdamW, made so that XLA compiles one step: all state exists before the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, get_args

import torch
from torch import nn

from tpucache.errors import UsageError
from tpucache.training.learn.parameters import RATE_SCALE, parameter_groups
from tpucache.training.learn.schedule import Rates
from tpucache.training.settings import OptimizerName

#: Makes an optimizer of groups of parameters, with the rate as `lr`.
OptimizerMaker = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: Final = get_args(OptimizerName)

_DECAY: Final = "asked_weight_decay"
_RATE_ALONE: Final = "schedule_sets_rate_alone"
_LEAST: Final = 2.0**-23  # the least that float32 can add to 1


def make_optimizer(
    model: nn.Module,
    kind: str | OptimizerMaker,
    lr: float,
    weight_decay: float = 0.0,
    *,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    layer_decay: float | None = None,
    respect_model: bool = True,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Return SGD with Nesterov momentum, or AdamW, over the parameters that require gradients, on their device.

    `fused` steps take one kernel for many parameters, which torch has for CUDA; AdamW's count is on the device then.
    A callable is given the groups of parameters, and the rate as `lr`; its schedule is then that of the rate alone.
    Biases, the scales of norms and what the model names do not decay; see `parameter_groups`. Raises UsageError.
    """
    if isinstance(kind, str) and kind not in OPTIMIZERS:
        raise UsageError(f"there is no optimizer {kind!r}: use {', '.join(OPTIMIZERS)}")
    if not lr > 0 or not weight_decay >= 0:
        raise UsageError(f"the rate is above 0 and the weight decay at least 0, not {lr} and {weight_decay}")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError("the model has no parameter that asks for gradients: there is nothing to train")
    groups = parameter_groups(model, weight_decay, layer_decay, respect_model=respect_model)
    optimizer: torch.optim.Optimizer
    if not isinstance(kind, str):
        optimizer = kind([{**group, _RATE_ALONE: True} for group in groups], lr=lr)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        return optimizer
    is_fused = True if fused and all(map(torch.is_floating_point, parameters)) else None
    if kind == "sgd":
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=True, fused=is_fused)
    else:
        optimizer = torch.optim.AdamW(
            [{**group, _DECAY: group["weight_decay"]} for group in groups], lr=lr, betas=betas, fused=is_fused
        )
    for parameter in parameters:
        # The state that the first step would make. AdamW's count stays on the host, as in torch, unless it is fused.
        if kind == "sgd":
            optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        else:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            count = torch.zeros((), device=parameter.device if is_fused else "cpu")
            optimizer.state[parameter] = {"step": count, **moments}
    return optimizer


def torch_optimizer(name: str) -> str | OptimizerMaker:
    """Return the optimizer of a name: one of the settings', or a class of `torch.optim`. Raises UsageError."""
    if name.lower() in OPTIMIZERS:
        return name.lower()
    base = torch.optim.Optimizer
    known = {key.lower(): kind for key, kind in vars(torch.optim).items() if isinstance(kind, type)}
    known = {
        key: kind for key, kind in known.items() if issubclass(kind, base) and kind not in (base, torch.optim.LBFGS)
    }
    if name.lower() not in known:
        raise UsageError(f"there is no optimizer {name!r}: use {', '.join(sorted(known))}, or give a callable")
    maker: OptimizerMaker = known[name.lower()]
    return maker


def has_groups(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> bool:
    """Return whether the state of an optimizer has groups of the same sizes as this one."""
    own = [len(group["params"]) for group in optimizer.param_groups]
    return own == [len(group["params"]) for group in state["param_groups"]]


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take over the state of an optimizer of as many groups, from any device: whether it is fused stays as it is here.

    What is on the device then, such as the count of a fused AdamW, goes there. Raises ValueError, KeyError for others.
    """
    groups = [
        {**saved, **({"fused": own["fused"]} if "fused" in own else {})}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})


def set_rates(optimizer: torch.optim.Optimizer, rates: Rates) -> None:
    """Use these rates in the next step; momentum is AdamW's first beta. Costs no compile.

    XLA makes a constant of a factor that is 1 in float32, and another graph. So AdamW's weights decay by 2^-23 at least
    where they do, and its count of steps stops where its correction no longer shows. Equal numbers are one input of a
    graph, and different ones another graph: with layers of their own rates, no two decay by the same multiple of that.
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
        if group.get("fused"):  # a count on a GPU, which has no such graph
            continue
        last = int(math.log(_LEAST) / math.log(group["betas"][1]))
        for parameter in group["params"]:
            optimizer.state[parameter]["step"].clamp_(max=last)


def scale_gradients(parameters: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all gradients by a number (), which stays on the device."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale all gradients down so that their norm together is at most `max_norm`; return the norm before that, ().

    It stays on the device: nothing is read back. Raises UsageError unless `max_norm` is above 0.
    """
    if not max_norm > 0:
        raise UsageError(f"the gradients' norm is clipped to a number above 0, not to {max_norm}")
    return nn.utils.clip_grad_norm_(parameters, max_norm)
