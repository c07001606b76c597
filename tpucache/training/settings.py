"""The settings that decide what a run computes from its data. Importing this module does not import torch."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from tpucache.errors import UsageError
from tpucache.loading.ahead import threads_option
from tpucache.ondevice.settings import AugmentSettings
from tpucache.options import check_options, option
from tpucache.plugins import PartTable

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

#: The optimizers that are set up for XLA and have default rates of their own.
OPTIMIZERS: Final = ("sgd", "adamw")
ScheduleName = Literal["one-cycle", "warmup-cosine", "constant"]
Precision = Literal["auto", "float32", "bf16", "fp16"]

#: The value of `epochs` that means: as many as a time limit allows.
AUTO: Final = "auto"

#: The classes of tasks by name, each imported when it is used. A task is made with its number of outputs.
TASKS: Final = PartTable[Any](
    "tpucache.tasks",
    {
        "classes": "tpucache.training.tasks.classes:Classes",
        "multilabel": "tpucache.training.tasks.classes:Multilabel",
        "regression": "tpucache.training.tasks.regression:Regression",
        "mask": "tpucache.training.tasks.mask:Mask",
    },
)

#: Settings that may differ when a run is resumed, because they change no result.
_FREE: Final = ("threads",)

#: Settings that are decided when a run begins, unless they are given.
_DECIDED: Final = (
    "epochs",
    "batch_size",
    "optimizer",
    "clip",
    "lr",
    "weight_decay",
    "schedule",
    "precision",
    "mean",
    "std",
)
#: Values of a setting that mean: decide it when the run begins.
_UNDECIDED: Final = (None, "auto")


@dataclass(frozen=True)
class TrainSettings:
    """The settings of one run. The same settings and data give the same run on every backend.

    `batch_size` is global: the samples of all cores in one optimizer step. `lr` is the highest learning rate. `clip` is
    the largest norm of all gradients together. `ema` is the decay of averaged weights, which are evaluated in place of
    the model's. `weights` are read when a run begins, not when it is resumed. `optimizer`, `train_step`, `eval_step`
    and each `metric` name a function as `module:callable`; `loss` names such a function, or a loss of the task.

    Settings that are left open are decided when a run begins, and the run's files have the decision. `epochs` follows
    from the number of samples; `batch_size` from the samples, the epochs and the cores; `optimizer` and `clip` from the
    task and the model; `lr`, `weight_decay` and `schedule` from the optimizer, the model's normalisation layers, the
    batch, and whether there are `weights`; `precision` from the device; `mean` and `std` from the origin of the
    weights, or else from the cache. `epochs="auto"` means as many as a time limit allows, at a pace that is measured
    first. Raises UsageError for values that are not possible.
    """

    model: str = option(
        "resnet18",
        "cnn, resnet9, resnet18, unet, timm:NAME, or your own, a module:callable that returns a model with N outputs; "
        "timm:NAME may have keywords, as in 'timm:NAME?drop_path_rate=0.1'",
        metavar="NAME",
        code="timm:",
    )
    weights: str | None = option(
        None,
        "begin with these weights: a file of torch or safetensors, or a folder with one; the best weights of a run; "
        "hub:OWNER/NAME from the local cache of the Hugging Face hub; or pretrained, timm's own for the model; weights "
        "are adapted as by timm, and a layer of another size, such as the last layer, is created anew",
        metavar="FILE|RUN|hub:NAME|pretrained",
    )
    freeze: tuple[str, ...] = option(
        (), "keep the weights of these modules or parameters as they are, such as 'layer[12]'", metavar="PATTERN"
    )
    layer_decay: float | None = option(
        None, "give each layer X times the learning rate of the layer after it, such as 0.75", metavar="X"
    )
    task: str = option("auto", "what the labels are; auto: chosen by looking at them", choices=TASKS.names("auto"))
    mask_classes: int | None = option(None, "number of classes in the masks, for the task mask", metavar="N", minimum=1)
    epochs: int | Literal["auto"] | None = option(
        None,
        "passes over the training samples; auto: as many as --time-limit allows; 5 if not given, more for few samples",
        metavar="N|auto",
    )
    batch_size: int | None = option(
        None,
        "samples in one optimizer step, on all cores together; chosen by samples, epochs and cores if not given",
        metavar="B",
        minimum=1,
    )
    accumulate: int = option(
        1, "split each batch into N parts and add up their gradients, to save memory", metavar="N", minimum=1
    )
    steps_per_execution: int = option(1, "compile K steps into one graph", metavar="K", minimum=1)
    optimizer: str | None = option(
        None,
        "sgd: SGD with Nesterov momentum; adamw: AdamW; or another one, module:name, such as torch.optim:NAdam; chosen "
        "by task and model if not given",
        metavar="NAME",
        code="",
    )
    schedule: ScheduleName | None = option(
        None, "how learning rate and momentum change over the run; chosen by optimizer and model if not given"
    )
    lr: float | None = option(
        None,
        "highest learning rate; find: measure it with a learning-rate range test; chosen by optimizer, model and batch "
        "if not given",
        metavar="X|find",
    )
    weight_decay: float | None = option(
        None,
        "weight decay, chosen by optimizer and model if not given; biases and normalisation layers have none",
        metavar="X",
    )
    size: int | None = option(
        None, "train on images of this size; the device makes them from dct-zstd and dct-lz4", metavar="N", minimum=8
    )
    grow: str | None = option(
        None,
        "smaller images first, each size until its share of the epochs, such as 128:0.4,176:0.7,224",
        metavar="N:SHARE,...,N",
    )
    valid_size: int | None = option(
        None, "evaluate on images of this size; training's last size if not given", metavar="N", minimum=8
    )
    smoothing: float = option(0.0, "label smoothing", metavar="X")
    balance: bool = option(
        False, "train on each class equally often: samples of rare classes come several times in an epoch"
    )
    clip: float | None = option(
        None,
        "clip the norm of all gradients together to this value; chosen by the task if --optimizer is not given either",
        metavar="NORM",
    )
    ema: float | None = option(
        None, "evaluate an exponential moving average of the weights with this decay, such as 0.999", metavar="DECAY"
    )
    precision: Precision = option(
        "auto",
        "precision of matrix products and convolutions; fp16 scales the loss, and is for GPUs; auto: bf16 on a TPU and "
        "on a GPU that has bf16, fp16 on other GPUs, elsewhere float32",
    )
    mean: tuple[float, ...] | None = option(
        None,
        "normalise by these means, one for each channel, in the numbers of the pixels (0 to 255); if not given, those "
        "of the run or timm model that --weights come from, without --weights the cache's",
        metavar="R,G,B",
    )
    std: tuple[float, ...] | None = option(
        None, "normalise by these standard deviations, one for each channel, in the unit of --mean", metavar="R,G,B"
    )
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    loss: str | None = option(
        None,
        "focal; bce for classes; dice or dice-cross-entropy for masks; l1 or huber for a regression; or your own, "
        "module:name, a function of (outputs, labels), which are float targets where they are smoothed or mixed",
        metavar="NAME",
        code="",
    )
    metric: tuple[str, ...] = option(
        (),
        "an additional metric of yours, a function of (predictions, labels), arrays of all validation samples, that "
        "returns a number",
        metavar="module:name",
        code="",
    )
    watch: str | None = option(
        None,
        "metric that chooses the best epoch; of a metric of your own more is better, or less with :min after its name",
        metavar="NAME",
    )
    patience: int | None = option(
        None, "stop after N epochs in which the watched metric was not better", metavar="N", minimum=1
    )
    train_step: str | None = option(
        None, "your training step, a function of (model, batch) that returns the loss", metavar="module:name", code=""
    )
    eval_step: str | None = option(
        None,
        "your evaluation step, a function of (model, batch) that returns the outputs",
        metavar="module:name",
        code="",
    )
    inputs: tuple[str, ...] = option(
        (),
        "give the model these columns of the samples table, too, as its second argument; the model is your own",
        metavar="NAME,NAME",
    )
    seed: int = option(0, "seed of weights, order, split and augmentation", metavar="N", minimum=0)
    threads: int = threads_option()

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("freeze", "metric"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # a list is the same setting
        if self.epochs not in (None, AUTO) and not (type(self.epochs) is int and self.epochs >= 1):
            raise UsageError(f"epochs is at least 1, or {AUTO!r}, not {self.epochs!r}")
        object.__setattr__(self, "inputs", tuple(name for each in self.inputs for name in each.split(",")))
        for name in ("mean", "std"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        if not all(map(math.isfinite, self.mean or ())):
            raise UsageError(f"mean holds finite numbers, not {self.mean}")
        if not all(0 < spread < math.inf for spread in self.std or ()):
            raise UsageError(f"std holds finite numbers above 0, not {self.std}")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise UsageError(f"layer_decay is above 0 and at most 1, not {self.layer_decay}")
        for name in ("smoothing", "ema"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UsageError(f"{name} is at least 0 and less than 1, not {value}")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} is above 0, not {value}")
        _ = self.sizes  # raises UsageError for impossible sizes
        if self.batch_size is not None and self.batch_size % self.accumulate:
            raise UsageError(
                f"a batch of {self.batch_size} does not divide into {self.accumulate} equal parts: choose another "
                "batch_size or accumulate"
            )

    @property
    def sizes(self) -> ImageSizes:
        """The size of the images in each epoch and in evaluations. Raises UsageError for impossible sizes."""
        epochs = self.epochs if isinstance(self.epochs, int) else 1
        return plan_sizes(epochs, self.size, self.grow, self.valid_size)

    @property
    def own_loss(self) -> str | None:
        """The `module:callable` of the user's own loss; None for a loss of the task."""
        return self.loss if is_code(self.loss) else None

    @property
    def batch(self) -> int:
        """The number of samples in one optimizer step. Raises UsageError before the batch size is decided."""
        if self.batch_size is None:
            raise UsageError("the batch size is decided when the run begins: give batch_size if you need it earlier")
        return self.batch_size

    @property
    def passes(self) -> int:
        """The number of epochs. Raises UsageError before the number is decided."""
        if not isinstance(self.epochs, int):
            raise UsageError(
                "the number of epochs is decided when the run begins: give epochs as a number if you need it earlier"
            )
        return self.epochs

    @property
    def peak_lr(self) -> float:
        """The highest learning rate of the run. Raises UsageError before it is decided."""
        if self.lr is None:
            raise UsageError("the learning rate is decided when the run begins: give lr if you need it earlier")
        return self.lr

    @property
    def part_size(self) -> int:
        """The number of samples in each of the `accumulate` parts of a batch."""
        return self.batch // self.accumulate

    def steps_per_epoch(self, samples: int) -> int:
        """Return the number of steps in an epoch of `samples` samples.

        Samples that do not fill a batch are left out, and so are steps that do not fill an execution of
        `steps_per_execution` steps.
        """
        steps = samples // self.batch
        return steps - steps % self.steps_per_execution

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)


def settings_from(values: Mapping[str, Any]) -> TrainSettings:
    unknown = {*values} - {item.name for item in fields(TrainSettings)}
    unknown |= {*values["augment"]} - {item.name for item in fields(AugmentSettings)}
    if unknown:
        raise UsageError(
            f"the run was made by another version of tpucache, as its settings have {sorted(unknown)}: use that version"
        )
    return TrainSettings(**{**values, "augment": AugmentSettings(**values["augment"])})


def unusual_settings(settings: TrainSettings) -> dict[str, Any]:
    usual = _flat(TrainSettings())
    return {name: value for name, value in _flat(settings).items() if value != usual[name]}


def undecided(settings: TrainSettings) -> list[str]:
    return [name for name in _DECIDED if getattr(settings, name) in _UNDECIDED]


def as_decided(settings: TrainSettings, before: TrainSettings) -> TrainSettings:
    """Return the settings; undecided settings get their values from `before`, the decided settings of a run."""
    decided = {name: getattr(before, name) for name in undecided(settings)}
    return replace(settings, **{name: value for name, value in decided.items() if not is_code(value)})


def is_code(value: object) -> bool:
    return isinstance(value, str) and ":" in value


def setting_differences(before: TrainSettings, now: TrainSettings) -> list[str]:
    """Return each setting that changes results and differs between two runs, in the form `seed 0, now 1`."""
    old, new = _flat(before), _flat(now)
    return [f"{name} {old[name]}, now {new[name]}" for name in old if old[name] != new[name] and name not in _FREE]


def _flat(settings: TrainSettings) -> dict[str, Any]:
    values = settings.to_dict()
    return {**{name: value for name, value in values.items() if name != "augment"}, **values["augment"]}


_STEP: Final = 32  # sizes are multiples of this, in pixels: most networks halve an image five times
_MOST: Final = 4  # sizes, at most: XLA compiles a graph for each size
_GROWING: Final = re.compile(r"(\d+)(?::([\d.]+))?")


@dataclass(frozen=True)
class ImageSizes:
    """The side of the images in pixels, in each epoch (`epochs`) and in evaluations (`valid`).

    None stands for the size of the dataset's images.
    """

    epochs: tuple[int | None, ...]
    valid: int | None

    def at(self, epoch: int) -> int | None:
        """Return the size in an epoch, counted from 0; later epochs have the size of the last planned epoch."""
        return self.epochs[min(epoch, len(self.epochs) - 1)]

    @property
    def is_one(self) -> bool:
        return {*self.epochs} == {self.valid}


@functools.lru_cache(maxsize=16)  # called in each step
def plan_sizes(
    epochs: int, size: int | None = None, grow: str | None = None, valid_size: int | None = None
) -> ImageSizes:
    """Return the image sizes of a run of `epochs` epochs.

    `grow` is a text such as "128:0.4,176:0.7,224": 128 pixels in the first 40 % of the epochs, then 176 until 70 %, and
    224 until the end.
    """
    if size is not None and grow is not None:
        raise UsageError("--size and --grow both say how large images are: leave one of them out")
    steps = [(size, 1.0)] if grow is None else _steps(grow)
    planned = [
        next(each for each, share in steps if epoch < round(share * epochs) or share == 1.0) for epoch in range(epochs)
    ]
    valid = valid_size if valid_size is not None else steps[-1][0]
    return ImageSizes(tuple(planned), valid)


def _steps(grow: str) -> list[tuple[int | None, float]]:
    wrong = f"--grow is such as 128:0.4,176:0.7,224, not {grow!r:.60}: "
    parts = [_GROWING.fullmatch(part.strip()) for part in grow.split(",")]
    if not all(parts):
        raise UsageError(f"{wrong}write SIZE:SHARE for each size but the last; it ends after this share of the epochs")
    found = [(int(part[1]), part[2]) for part in parts if part]
    if found[-1][1] is not None or any(share is None for _, share in found[:-1]):
        raise UsageError(f"{wrong}each size but the last has a share, and the last has none")
    try:
        shares = [float(share) for _, share in found[:-1] if share is not None]
    except ValueError:
        raise UsageError(f"{wrong}a share is a number from 0 to 1") from None
    if shares != sorted(set(shares)) or any(not 0 < share < 1 for share in shares):
        raise UsageError(f"{wrong}shares ascend, and each is above 0 and below 1")
    if len(found) > _MOST:
        raise UsageError(f"{wrong}at most {_MOST} sizes, as XLA compiles a graph for each")
    if odd := [side for side, _ in found if side % _STEP or not side]:
        raise UsageError(f"{wrong}sizes are multiples of {_STEP}, and {odd[0]} is not")
    return [(side, share) for (side, _), share in zip(found, [*shares, 1.0], strict=True)]


def own_size(dataset: CachedDataset) -> int:
    from tpucache.store.fields import IMAGE

    image = next(field for field in dataset.manifest.fields if field.name == IMAGE)
    height, width = image.shape[:2]
    if height != width:
        raise UsageError(
            f"--valid-size makes square images, and the images of {dataset.directory} are {width}x{height} pixels: say "
            "by --size how large training images are"
        )
    return int(height)


def in_size(dataset: CachedDataset, size: int | None) -> CachedDataset:
    if size is None:
        return dataset
    from tpucache.store.codecs import CODECS, FREQUENCY_CODECS
    from tpucache.store.fields import IMAGE

    image = next((field for field in dataset.manifest.fields if field.name == IMAGE), None)
    if image is not None and not CODECS[image.codec].has_frequencies:
        raise UsageError(
            f"images of {image.codec} have one size, here {image.shape[1]}x{image.shape[0]} pixels; only "
            f"{' and '.join(FREQUENCY_CODECS)} give any size: to train at {size} pixels, warm up with "
            f"`--codec dct-lz4`, or with `--size {size}`"
        )
    return dataset.in_resolution(size)
