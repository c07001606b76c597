"""Decides, once before a run begins, the settings that are left open.

Batch size, optimizer, rate, weight decay and schedule follow from small rules, the precision from the device.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.training.device import Device
from tpucache.training.forward import decide_statistics
from tpucache.training.model import build_model, channels_of, is_made_here
from tpucache.training.optimizers import OptimizerMaker, find_optimizer, optimizer_name
from tpucache.training.settings import AUTO, ScheduleName, TrainSettings
from tpucache.training.tasks.task import Task

#: A model's kind of normalisation layers, which decides its learning rate; with many layers the rate is lower.
Family = Literal["batch norm", "many batch norms", "layer norm", "no norm"]

#: A model with at least this number of BatchNorm layers has many. A ResNet-18 has 20.
_MANY: Final = 16

_WIDE: Final = (
    "0.1 for 128: arXiv:1605.07146; twice that for 8 or fewer; by the root of the batch: arXiv:1404.5997; "
    "one cycle: arXiv:1708.07120"
)
_DEEP: Final = (
    "ResNet's 0.1 for 256, linear in the batch: arXiv:1706.02677; not lowered below 16; one cycle: arXiv:1708.07120"
)
_FASTAI: Final = "fastai's 0.003 for 64, arXiv:2002.04688; by the root of the batch: arXiv:2205.10287"
#: Batches are small where runs are short (see `decide_length`), and short runs need AdamW's rate for large batches.
_SHORT: Final = "for a batch of 128, and not lowered for smaller ones, whose runs are short"
_FASTAI_TWICE: Final = f"twice fastai's 0.003 for 64, arXiv:2002.04688; {_SHORT}"
_CONVNEXT: Final = f"twice ConvNeXt's 0.004 for 4096 and 300 epochs, arXiv:2201.03545; {_SHORT}"
_CONVNEXT_CLIPPED: Final = f"four times ConvNeXt's 0.004 for 4096 and 300 epochs, arXiv:2201.03545; {_SHORT}"
_TUNED: Final = "a tenth of the rate from random weights, as Girshick et al., arXiv:1311.2524"

#: Steps that a run should have at least: with fewer it learns nothing at any rate (docs/training.md has figures).
_STEPS: Final = 250
#: Samples in the largest batch on one device.
_MOST_BATCH: Final = 128
#: Samples in the smallest share of a batch, and in that of some models (see `least_share`).
_LEAST_SHARE: Final = 8
_SMALL_SHARE: Final = 4
#: The smallest batch, unless there are few samples. Smaller ones take longer for each sample, for a deep model twice.
_LEAST_BATCH: Final = 32
#: With fewer samples, a run that shows fewer than the second number has the smallest shares. It ends soon all the same,
#: and it learns more (docs/numbers.md has figures).
_FEW_SAMPLES: Final = 1_000
_FEW_SHOWN: Final = 16_000
#: The default number of epochs. With --epochs auto, the batch size is decided as for this number of epochs: the pace,
#: which decides the epochs, can be measured only with a batch size.
_EPOCHS: Final = 5
#: Samples that all epochs together show at least, and the most epochs for it: a run on few samples has more epochs.
_SHOWN: Final = 8_000
_MOST_EPOCHS: Final = 100

#: The batch for which the table has its rates.
_BASE: Final = 256

#: The largest norm of the gradients of a regression: the squared errors of outliers have no bound.
_REGRESSION_CLIP: Final = 1.0

#: The default schedule.
_SCHEDULE: Final[ScheduleName] = "one-cycle"

#: How a rate scales with the batch size.
ScaleRule = Literal["none", "linear", "sqrt"]

#: Why a precision is a device's default: the ends of such messages.
_WHY: Final = {"bf16": ", which has it", "fp16": ", which has no bf16 of its own"}


class Defaults(NamedTuple):
    """The default learning rate and the settings that go with it.

    `rate` is the highest rate of the schedule, for a batch of 256, and `scale` says how it scales with the batch size.
    `of_small` has other rates, which are not scaled: pairs of the largest batch that has the rate, and the rate, the
    smallest batch first. `source` says where the values come from, for messages.
    """

    rate: float
    scale: ScaleRule
    weight_decay: float
    source: str
    of_small: tuple[tuple[int, float], ...] = ()

    def lr(self, batch_size: int) -> float:
        """Return the rate for a batch: scaled as in arXiv:1706.02677 or by the root, arXiv:1404.5997, or its own."""
        own = [lr for most, lr in self.of_small if batch_size <= most]
        return own[0] if own else self.scaled(batch_size)

    def scaled(self, batch_size: int) -> float:
        times = batch_size / _BASE
        return self.rate * {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[self.scale]


#: Rates of small batches, as in `Defaults.of_small`. Batches are small where runs are short, and short runs need the
#: rate of large batches. Runs with the smallest ones have more steps, and learn more at a still higher rate
#: (docs/numbers.md has figures).
_WIDE_SMALL: Final = ((_LEAST_SHARE, 0.2), (_MOST_BATCH - 1, 0.099))
_DEEP_SMALL: Final = ((2 * _LEAST_SHARE - 1, 0.00625),)

#: The defaults by optimizer, kind of normalisation layers, and whether the run begins with given weights.
_TABLE: Final[dict[tuple[str, Family, bool], Defaults]] = {
    ("sgd", "batch norm", False): Defaults(0.14, "sqrt", 5e-4, _WIDE, _WIDE_SMALL),
    ("sgd", "batch norm", True): Defaults(0.02, "linear", 1e-4, _TUNED),
    ("sgd", "many batch norms", False): Defaults(0.1, "linear", 5e-4, _DEEP, _DEEP_SMALL),
    ("sgd", "many batch norms", True): Defaults(0.02, "linear", 1e-4, _TUNED),
    ("sgd", "layer norm", False): Defaults(0.03, "linear", 1e-4, "ViT's, arXiv:2010.11929"),
    ("sgd", "layer norm", True): Defaults(0.003, "linear", 1e-4, _TUNED),
    ("sgd", "no norm", False): Defaults(0.01, "linear", 5e-4, "VGG's, arXiv:1409.1556"),
    ("sgd", "no norm", True): Defaults(0.001, "linear", 5e-4, _TUNED),
    ("adamw", "batch norm", False): Defaults(8.4e-3, "none", 0.05, _FASTAI_TWICE),
    ("adamw", "batch norm", True): Defaults(6e-4, "sqrt", 0.05, _TUNED),
    ("adamw", "many batch norms", False): Defaults(6e-3, "sqrt", 0.05, _FASTAI),
    ("adamw", "many batch norms", True): Defaults(6e-4, "sqrt", 0.05, _TUNED),
    ("adamw", "layer norm", False): Defaults(1.4e-3, "none", 0.05, _CONVNEXT),
    ("adamw", "layer norm", True): Defaults(2e-4, "sqrt", 0.05, _TUNED),
    ("adamw", "no norm", False): Defaults(1e-3, "sqrt", 0.01, "torch's own"),
    ("adamw", "no norm", True): Defaults(1e-4, "sqrt", 0.01, _TUNED),
}

#: What a regression has instead if its gradients are clipped: they stay stable at a higher rate (docs/numbers.md).
_OF_REGRESSION: Final[dict[tuple[str, Family, bool], Defaults]] = {
    ("adamw", "layer norm", False): Defaults(2.8e-3, "none", 0.05, _CONVNEXT_CLIPPED),
}


@dataclass(frozen=True)
class Custom:
    """Functions that a Python program gives instead of names.

    `build` makes the model, and `make_optimizer` the optimizer.
    """

    build: Callable[..., nn.Module] | None = None
    make_optimizer: OptimizerMaker | None = None


@dataclass(frozen=True)
class Decided:
    """The settings of a run with nothing left open, and its new model, on which some settings depend.

    `optimizer` makes the optimizer, or names it. `rates`, `batch` and `precision` are texts that say what was decided,
    and why.
    """

    settings: TrainSettings
    model: nn.Module
    optimizer: OptimizerMaker | str
    rates: str
    batch: str
    precision: str


def decide_settings(
    settings: TrainSettings, dataset: CachedDataset, task: Task, device: Device, custom: Custom | None = None
) -> Decided:
    custom = custom or Custom()
    torch.manual_seed(settings.seed)  # on the host, so that the weights are the same on every backend
    channels, columns = channels_of(dataset.manifest.fields), dataset.column_width
    model = device.processes.norms(build_model(settings.model, task.outputs, channels, columns, custom.build))
    there = len(dataset), device.cores, device.processes.world_size, least_share(settings, task, model)
    settings = decide_length(settings, *there)
    settings = decide_optimizer(settings, task, model, custom.make_optimizer)
    optimizer = custom.make_optimizer or find_optimizer(str(settings.optimizer))
    maker = None if isinstance(optimizer, str) else optimizer
    is_regression = task.name == "regression"
    settings = decide_precision(decide_rates(settings, model, maker, is_regression), device)
    settings = decide_statistics(settings, dataset, model)
    return Decided(
        settings,
        model,
        optimizer,
        rates=describe_rates(settings, model, maker, is_regression),
        batch=describe_batch(settings, *there),
        precision=describe_precision(settings, device),
    )


def decide_length(
    settings: TrainSettings, samples: int, cores: int = 1, processes: int = 1, least: int = _LEAST_SHARE
) -> TrainSettings:
    """A batch has equal shares, one for each core; by default it is a power of two with which the run has 250 steps."""
    if settings.epochs is None:
        epochs = math.ceil(_SHOWN / max(samples, 1))
        settings = replace(settings, epochs=min(max(epochs, _EPOCHS), _MOST_EPOCHS))
    if settings.batch_size is not None:
        return settings
    share = cores * processes * settings.accumulate  # parts with the same number of samples
    most = samples // settings.steps_per_execution // share * share
    if not most:
        raise UsageError(
            f"{samples} training samples are too few: there must be one for each of {cores} cores, times "
            f"{processes} processes, {settings.accumulate} parts and {settings.steps_per_execution} steps: use fewer "
            "cores, --processes, --accumulate or --steps-per-execution"
        )
    epochs = _EPOCHS if settings.epochs == AUTO else settings.passes
    shown = samples * epochs
    are_few = samples < _FEW_SAMPLES and shown < _FEW_SHOWN
    steady = max(_LEAST_BATCH, 2 ** int(math.log2(max(shown / _STEPS, 1))), _LEAST_SHARE * share)
    wanted = min(least * share if are_few else steady, _MOST_BATCH * cores * processes)
    return replace(settings, batch_size=min(max(wanted // share, 1) * share, most))


def expect_least_share(settings: TrainSettings, task: Task, dataset: CachedDataset, samples: int) -> int:
    if settings.batch_size is not None or samples >= _FEW_SAMPLES or not is_made_here(settings.model):
        return _LEAST_SHARE
    with torch.random.fork_rng(devices=[]):
        model = build_model(settings.model, task.outputs, channels_of(dataset.manifest.fields))
    return least_share(settings, task, model)


def least_share(settings: TrainSettings, task: Task, model: nn.Module) -> int:
    """Models with LayerNorm, and regressions, learn more from batches of 4 than of 8 (docs/numbers.md)."""
    if settings.weights is not None or not is_made_here(settings.model):
        return _LEAST_SHARE
    family = find_family(model)
    is_small = family == "layer norm" or (family == "batch norm" and task.name == "regression")
    return _SMALL_SHARE if is_small else _LEAST_SHARE


def describe_batch(
    settings: TrainSettings, samples: int, cores: int = 1, processes: int = 1, least: int = _LEAST_SHARE
) -> str:
    default = decide_length(replace(settings, batch_size=None), samples, cores, processes, least).batch
    devices = f" on {cores * processes} cores" if cores * processes > 1 else ""
    epochs = f"{settings.passes} epoch{'s' * (settings.passes > 1)}"
    of = f"for {samples:,} samples, {epochs}{devices}"
    steps = settings.passes * settings.steps_per_epoch(samples)
    if settings.batch == default:
        return f"{default}: default {of}, which make {steps:,} steps"
    return f"{settings.batch}: given, or kept from when the run began; {default} is the default {of}"


def decide_optimizer(
    settings: TrainSettings, task: Task, model: nn.Module, make_optimizer: OptimizerMaker | None = None
) -> TrainSettings:
    """A regression gets AdamW and clipped gradients: its squared errors have no bound, and SGD diverges."""
    if settings.optimizer is not None or make_optimizer is not None:
        return settings
    if task.name == "regression":
        return replace(settings, optimizer="adamw", clip=settings.clip or _REGRESSION_CLIP)
    return replace(settings, optimizer="adamw" if find_family(model) == "layer norm" else "sgd")


def decide_rates(
    settings: TrainSettings,
    model: nn.Module,
    make_optimizer: OptimizerMaker | None = None,
    is_regression: bool = False,
) -> TrainSettings:
    """Return the settings with a learning rate, a weight decay and a schedule; given values are kept.

    The settings must have an optimizer, unless `make_optimizer` makes it.
    """
    found = find_defaults(settings, model, make_optimizer, is_regression)
    if settings.lr is None and math.isnan(found.rate):
        raise UsageError("an optimizer of your own has no default learning rate: give lr")
    return replace(
        settings,
        lr=found.lr(settings.batch) if settings.lr is None else settings.lr,
        weight_decay=found.weight_decay if settings.weight_decay is None else settings.weight_decay,
        schedule=settings.schedule or _SCHEDULE,
    )


def find_defaults(
    settings: TrainSettings, model: nn.Module, make_optimizer: OptimizerMaker | None, is_regression: bool
) -> Defaults:
    """Return the defaults for a run: a row of the tables, or those of the optimizer that `make_optimizer` makes."""
    if make_optimizer is not None:
        return _own_defaults(make_optimizer)
    if settings.optimizer is None:
        raise UsageError(
            "the settings have no optimizer, on which the defaults depend: give optimizer, for example 'adamw'"
        )
    key = settings.optimizer, find_family(model), settings.weights is not None
    is_clipped = is_regression and settings.clip is not None
    return _OF_REGRESSION.get(key, _TABLE[key]) if is_clipped else _TABLE[key]


def find_family(model: nn.Module) -> Family:
    """Of two kinds of norms the more frequent one counts; `_MANY` or more BatchNorms are "many batch norms"."""
    kinds = Counter(kind for module in model.modules() if (kind := _kind_of_norm(module)) is not None)
    if not kinds:
        return "no norm"
    if kinds["layer norm"] >= kinds["batch norm"]:
        return "layer norm"
    return "many batch norms" if kinds["batch norm"] >= _MANY else "batch norm"


def describe_rates(
    settings: TrainSettings,
    model: nn.Module,
    make_optimizer: OptimizerMaker | None = None,
    is_regression: bool = False,
) -> str:
    found = find_defaults(settings, model, make_optimizer, is_regression)
    usual = found.lr(settings.batch)
    are_usual = {
        "lr": settings.lr == usual,
        "weight decay": settings.weight_decay == found.weight_decay,
        "schedule": settings.schedule == _SCHEDULE,
    }
    others = [name for name, is_usual in are_usual.items() if not is_usual]
    name = optimizer_name(make_optimizer) if settings.optimizer is None and make_optimizer else settings.optimizer
    is_scaled = settings.lr == usual == found.scaled(settings.batch) != found.rate
    scaled = f" ({found.rate:.3g} for a batch of 256, {found.scale})" if is_scaled else ""
    values = f"{name}, lr {settings.peak_lr:.3g}{scaled}, weight decay {settings.weight_decay:g}, {settings.schedule}"
    if settings.clip is not None:
        values += f", gradients clipped to a norm of {settings.clip:g}"
    if not any(are_usual.values()):
        return f"{values}: as given"
    begun = "with given weights" if settings.weights is not None else "from random weights"
    of_model = "" if make_optimizer is not None else f" for a model with {find_family(model)}, {begun}"
    given = f"; given: {', '.join(others)}" if others else ""
    return f"{values}: default{of_model} ({found.source}){given}"


def decide_precision(settings: TrainSettings, device: Device) -> TrainSettings:
    if settings.precision == "auto":
        return replace(settings, precision=device.precisions[0])
    if settings.precision not in device.precisions:
        raise UsageError(
            f"the device {device.torch_device.type!r} does not train in {settings.precision}: give --precision "
            f"{' or '.join(device.precisions)}"
        )
    return settings


def describe_precision(settings: TrainSettings, device: Device) -> str:
    default = device.precisions[0]
    of_device = f"default on {device.torch_device.type}{_WHY.get(default, '')}"
    if settings.precision == default:
        return f"{default}: {of_device}"
    return f"{settings.precision}: given; {default} is {of_device}"


def _own_defaults(make_optimizer: OptimizerMaker) -> Defaults:
    """Return the defaults of an optimizer of the user's own; the rate is NaN if it has none."""
    parameters: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):  # callables written in C may have no signature
        parameters = inspect.signature(make_optimizer).parameters
    known = {name: each.default for name, each in parameters.items() if isinstance(each.default, (int, float))}
    return Defaults(
        float(known.get("lr", math.nan)), "none", float(known.get("weight_decay", 0)), "the optimizer's own"
    )


def _kind_of_norm(module: nn.Module) -> Family | None:
    names = [kind.__name__ for kind in type(module).__mro__]
    if any("LayerNorm" in name or "RMSNorm" in name for name in names):
        return "layer norm"
    if isinstance(module, nn.GroupNorm):
        return "layer norm" if module.num_groups == 1 else "batch norm"
    return "batch norm" if isinstance(module, _NormBase) else None
