"""What a training run is made of beside its data and its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal, get_args

from tpucache.errors import UsageError
from tpucache.ondevice.augment import AugmentSettings
from tpucache.training.learn.optimizers import OPTIMIZERS, OptimizerName
from tpucache.training.learn.schedule import SCALE_RULES, SCHEDULES, ScaleRule, ScheduleName, scale_lr
from tpucache.training.learn.tasks.find import TASKS, TaskName

Normalisation = Literal["cache", "imagenet"]

_CHOICES: Final = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "scale": SCALE_RULES,
    "normalise": get_args(Normalisation),
    "task": ("auto", *TASKS),
    "class_weights": ("none", "balanced"),
}
_AT_LEAST: Final = {"epochs": 1, "batch_size": 1, "threads": 1, "seed": 0, "accumulate": 1, "steps_per_execution": 1}
#: What may differ when a run is resumed: it changes no number.
_FREE: Final = ("threads",)


@dataclass(frozen=True)
class TrainSettings:
    """One run's recipe. The same settings and data give the same run, whatever the backend and its cores.

    `batch_size` is global: all cores' together, for one step of the optimizer. `accumulate` sends it in so many parts,
    `steps_per_execution` makes so many steps one graph. `lr` is the highest rate, scaled from a batch of 256 by the
    rule `scale`; `warmup` the share of the steps in which it is reached (None: the schedule's own). `mask_classes` are
    the classes of the task "mask". `clip` is the largest norm of all gradients. `ema` is the decay of averaged weights,
    which are then what is evaluated. `loss`, `train_step` and `eval_step` name a `module:callable` each. Raises
    UsageError.
    """

    model: str = "resnet18"
    task: TaskName | Literal["auto"] = "auto"
    mask_classes: int | None = None
    epochs: int = 5
    batch_size: int = 128
    accumulate: int = 1
    steps_per_execution: int = 1
    optimizer: OptimizerName = "sgd"
    schedule: ScheduleName = "one-cycle"
    lr: float = 0.1
    scale: ScaleRule = "none"
    warmup: float | None = None
    weight_decay: float = 5e-4
    smoothing: float = 0.0
    class_weights: Literal["none", "balanced"] = "none"
    clip: float | None = None
    ema: float | None = None
    bf16: bool = False
    normalise: Normalisation = "cache"
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    loss: str | None = None
    train_step: str | None = None
    eval_step: str | None = None
    seed: int = 0
    threads: int = 2

    def __post_init__(self) -> None:
        for name, low in _AT_LEAST.items():
            if getattr(self, name) < low:
                raise UsageError(f"{name} is at least {low}, not {getattr(self, name)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} is one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if not self.lr > 0:
            raise UsageError(f"lr is above 0, not {self.lr}")
        for name in ("warmup", "smoothing", "ema"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UsageError(f"{name} is at least 0 and less than 1, not {value}")
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"clip is above 0, not {self.clip}")
        if self.batch_size % self.accumulate:
            raise UsageError(f"a batch of {self.batch_size} does not divide into {self.accumulate} parts")

    @property
    def peak_lr(self) -> float:
        """The highest learning rate."""
        return scale_lr(self.lr, self.batch_size, self.scale)

    @property
    def part_size(self) -> int:
        """Samples that are sent to the device at once."""
        return self.batch_size // self.accumulate

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)


def settings_from(values: Mapping[str, Any]) -> TrainSettings:
    """Return the settings that `to_dict` gave, now or in an earlier version.

    A setting that did not exist then has its default, which is therefore always what was done before it existed.
    Raises UsageError for settings of a later version.
    """
    unknown = {*values} - {item.name for item in fields(TrainSettings)}
    unknown |= {*values["augment"]} - {item.name for item in fields(AugmentSettings)}
    if unknown:
        raise UsageError(f"the run was made by a later version of tpucache: its settings have {sorted(unknown)}")
    return TrainSettings(**{**values, "augment": AugmentSettings(**values["augment"])})


def setting_differences(before: TrainSettings, now: TrainSettings) -> list[str]:
    """Say in which settings, of those that change the run's numbers, two runs differ."""
    old, new = _flat(before), _flat(now)
    return [f"{name} {old[name]}, now {new[name]}" for name in old if old[name] != new[name] and name not in _FREE]


def _flat(settings: TrainSettings) -> dict[str, Any]:
    values = settings.to_dict()
    return {**{name: value for name, value in values.items() if name != "augment"}, **values["augment"]}
