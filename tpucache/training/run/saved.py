"""A trained model in a run's folder: what the files of a run hold is checked before it is used."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import torch
from torch import nn

from tpucache.errors import FormatError, TrainingError, UsageError
from tpucache.loading.columns import Columns, columns_from
from tpucache.ondevice.settings import AugmentSettings
from tpucache.runs import BEST_NAME, LAST_NAME
from tpucache.store.fields import IMAGE, Field, check_field
from tpucache.store.files import read_file
from tpucache.store.format import MAX_FIELDS, MAX_SAMPLES
from tpucache.store.manifest import Number
from tpucache.text import DISTINCT, LARGEST, at_most, between, check_types, parse_object, read_as
from tpucache.training.model import build_model, is_user_code
from tpucache.training.run.state import RunState
from tpucache.training.settings import TrainSettings, settings_from
from tpucache.training.tasks.find import make_task
from tpucache.training.tasks.task import Task
from tpucache.training.weights import is_stored_whole, load_checkpoint

Kind = TypeVar("Kind")

_SHOWN: Final = 200  # characters of a library's message, at most
VERSION: Final = 1

_MAX_OUTPUTS: Final = 1 << 22
_MAX_COLUMNS: Final = 1 << 16
_MAX_NESTING: Final = 16
_LEAST: Final = 5e-324  # the smallest number above 0
_MAX_VALUES: Final = 1 << 24
#: Dtypes of weights, and of counters such as BatchNorm's.
_DTYPES: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)


def load_best(run: Path) -> dict[str, Any]:
    return _load(run / BEST_NAME, _check_best)


def load_last(run: Path) -> dict[str, Any]:
    return _load(run / LAST_NAME, _check_last)


def read_json(path: Path, kind: type[Kind]) -> Kind | None:
    """Return the object in a JSON file as an instance of a dataclass; None if there is no such file."""
    try:
        content = parse_object(read_file(path), path.name)
        check_types(content, kind, path.name)  # a wrong value says more than a missing one
        return read_as(kind, content, path.name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (FormatError, OSError) as error:
        raise TrainingError(f"{path} cannot be read: {error}. Remove it to continue, or copy the run again") from error


def _load(path: Path, check: Callable[[Mapping[str, Any], str], None]) -> dict[str, Any]:
    content = load_checkpoint(path)
    try:
        plain = _plain(content)
        if not isinstance(plain, dict):
            raise FormatError(f"{path.name} does not hold a dict")
        if plain.get("version") != VERSION:
            raise UsageError(f"{path} was written by another version of tpucache: give another folder")
        if not isinstance(plain.get("settings"), dict):
            raise FormatError(f"{path.name}: it has no settings")
        if "precision" not in plain["settings"]:
            raise UsageError(
                f"{path} was written before version 0.2 of tpucache: use the run with version 0.2, or train again in "
                "another folder"
            )
        _check_metadata(plain, path.name)
        check(plain, path.name)
    except FormatError as error:
        raise TrainingError(f"{path} cannot be used: {error}. Copy it again, or train again") from error
    return content


def _plain(content: object) -> Any:
    values = itertools.count()

    def copied(value: object, depth: int) -> Any:
        # A pickle of a few bytes may expand: a list holds another list many times, which holds another one, and so on.
        if depth > _MAX_NESTING or next(values) > _MAX_VALUES:
            raise FormatError(f"it holds more than {_MAX_VALUES:,} values, or nests deeper than {_MAX_NESTING} levels")
        if isinstance(value, dict):
            return {key: copied(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [copied(inner, depth + 1) for inner in value]
        return value

    return copied(content, 0)


@dataclass(frozen=True)
class _Column:
    """An input column of the model as the run encoded it.

    `names` are the values of a column of texts; `mean` and `std` are those of a column of numbers.
    """

    name: str
    names: tuple[str, ...]
    mean: Number
    std: Annotated[float, between(_LEAST, LARGEST)]


@dataclass(frozen=True)
class _Metadata:
    settings: Mapping[str, Any]
    task: str
    outputs: Annotated[int, between(1, _MAX_OUTPUTS)]
    classes: Annotated[tuple[str, ...], DISTINCT]
    samples: Annotated[int, between(0, MAX_SAMPLES)]
    fingerprint: str
    fields: Annotated[tuple[Field, ...], at_most(MAX_FIELDS)]
    mean: tuple[Number, ...]
    std: tuple[Annotated[float, between(_LEAST, LARGEST)], ...]
    digests: dict[str, str | None]
    columns: Annotated[tuple[_Column, ...], at_most(_MAX_COLUMNS)] = ()
    value_names: Annotated[tuple[str, ...], DISTINCT] = ()
    images: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Learner:
    """`optimizer` and `ema` are checked when they are loaded."""

    model: dict[str, Any]
    scaler: dict[str, Annotated[float, between(0.0, LARGEST)]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Last:
    learner: _Learner
    stand: Mapping[str, Any]


def _check_metadata(content: Mapping[str, Any], where: str) -> None:
    check_types(content["settings"], TrainSettings, f"{where}.settings")
    check_types(content["settings"].get("augment"), AugmentSettings, f"{where}.settings.augment")
    try:
        settings_from(content["settings"])
    except TypeError as error:  # required settings are missing
        raise FormatError(f"{where}.settings: {error}") from error
    found = read_as(_Metadata, content, where)
    for each in found.fields:
        check_field(each)
    channels = next((each.shape[2] for each in found.fields if each.name == IMAGE), None)
    channels = len(found.mean) if channels is None else channels
    if not len(found.mean) == len(found.std) == channels:
        raise FormatError(
            f"{where}: 'mean' has {len(found.mean)} values and 'std' {len(found.std)}: the channels are {channels}"
        )


def _check_best(content: Mapping[str, Any], where: str) -> None:
    _check_tensors(content.get("model"), f"{where}.model")


def _check_last(content: Mapping[str, Any], where: str) -> None:
    found = read_as(_Last, content, where)
    check_types(found.stand, RunState, f"{where}.stand")
    if unknown := {*found.stand} - {each.name for each in fields_of(RunState)}:
        raise FormatError(f"{where}.stand: {sorted(map(str, unknown))[0][:60]!r} is no field of a run's state")
    if found.stand.get("steps") != len(found.stand.get("losses", ())):
        raise FormatError(f"{where}.stand: the number of losses is not the number of steps")
    _check_tensors(found.learner.model, f"{where}.learner.model")


def _check_tensors(tensors: object, where: str) -> None:
    if not isinstance(tensors, dict) or not tensors:
        raise FormatError(f"{where} has no tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise FormatError(f"{where} has a name that is not text, or a value that is not a tensor")
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPES or tensor.device.type != "cpu":
            raise FormatError(
                f"{where}: {name[:60]!r} is a tensor of {tensor.dtype}, {tensor.layout}, as no run writes it"
            )
        if not is_stored_whole(tensor):
            raise FormatError(f"{where}: {name[:60]!r} has more values than the file stores for it")


#: The dtype and shape of a field.
FieldKind = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class SavedRun:
    """The best weights of a run, from the content of its `best.pt`."""

    folder: Path
    content: Mapping[str, Any]

    @functools.cached_property
    def settings(self) -> TrainSettings:
        return settings_from(self.content["settings"])

    @functools.cached_property
    def task(self) -> Task:
        task, constants = make_task(self.content["task"], self.content["outputs"]), self.content.get("labels", {})
        try:
            return (task if self.settings.own_loss else task.with_loss(self.settings.loss)).with_constants(constants)
        except UsageError as error:
            raise TrainingError(f"{self._path} cannot be used: {error}. Copy it again, or train again") from error

    @functools.cached_property
    def columns(self) -> Columns:
        return columns_from(self.content.get("columns", []))

    @property
    def value_names(self) -> tuple[str, ...]:
        """The `value_names` of the training cache; () if it had none, or an earlier version wrote the run."""
        return tuple(self.content.get("value_names", ()))

    @property
    def images(self) -> dict[str, str]:
        """The `image_settings` of the training cache; {} if an earlier version wrote the run."""
        return dict(self.content.get("images", {}))

    @functools.cached_property
    def fields(self) -> dict[str, FieldKind]:
        return {field["name"]: (field["dtype"], tuple(field["shape"])) for field in self.content["fields"]}

    @property
    def inputs(self) -> dict[str, FieldKind]:
        if IMAGE in self.fields and self.settings.eval_step is None:
            return {IMAGE: self.fields[IMAGE]}
        return make_task(self.content["task"], self.content["outputs"]).inputs(self.fields)

    def check_trusted(self, trust: Collection[str]) -> None:
        """Raise UsageError if `best.pt` names code of a user, as `module:name`, that is not in `trust`."""
        trust = {trust} if isinstance(trust, str) else trust  # `in` would find parts of a text
        called = [self.settings.model] if is_user_code(self.settings.model) else []
        called += [] if self.settings.eval_step is None else [self.settings.eval_step]
        if unknown := [name for name in called if name not in trust]:
            raise UsageError(
                f"{self._path} names code, {' and '.join(map(repr, unknown))}, that would be imported and called: if "
                f"you trust it, add {' '.join(f'--trust {name}' for name in unknown)} (in Python trust={unknown})"
            )

    def load_model(self, build: Callable[..., nn.Module] | None = None) -> nn.Module:
        """Return the model with its weights, on the host; `build` makes one that was given to `train` as an object."""
        name, weights = self.settings.model, self.content["model"]
        channels = self.fields[IMAGE][1][2] if IMAGE in self.fields else 3
        model = build_model(name, self.content["outputs"], channels, self.columns.width, build).to("cpu")
        own = model.state_dict()
        for each, tensor in weights.items():
            if each in own and tensor.dtype != own[each].dtype:
                raise TrainingError(
                    f"{self._path} does not fit the model {name!r}: {each} is {tensor.dtype}, not {own[each].dtype}. "
                    "Copy it again, or train again"
                )
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:_SHOWN]
            raise TrainingError(
                f"{self._path} does not fit the model {name!r}: {reason}. Use the model of the run, or train again"
            ) from error
        return model.eval()

    @property
    def _path(self) -> Path:
        return self.folder / BEST_NAME


def load_run(run: Path) -> SavedRun:
    if (run / BEST_NAME).exists():
        return SavedRun(run, load_best(run))
    if (run / LAST_NAME).exists():
        raise TrainingError(
            f"{run} has no {BEST_NAME}, as no epoch of the run has ended: continue the run with train --resume first"
        )
    raise TrainingError(f"{run} holds no run: give the folder that `train --run` named")
