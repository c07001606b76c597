"""What the files of a run hold, checked as strictly as a manifest before any of it is used."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import torch

from tpucache.errors import FormatError, TrainingError, UsageError
from tpucache.ondevice.settings import AugmentSettings
from tpucache.runs import BEST_NAME, LAST_NAME
from tpucache.store.fields import IMAGE
from tpucache.store.files import read_file
from tpucache.store.format import MAX_FIELDS, MAX_SAMPLES
from tpucache.store.manifest import JsonObject, read_field, read_object
from tpucache.strict_json import LARGEST
from tpucache.training.run.checkpoint import is_stored_whole, load_checkpoint
from tpucache.training.run.state import RunState
from tpucache.training.settings import TrainSettings, settings_from

VERSION: Final = 1

_MAX_OUTPUTS: Final = 1 << 22
_MAX_COLUMNS: Final = 1 << 16
_MAX_NESTING: Final = 16
_MAX_VALUES: Final = 1 << 24
#: What weights are stored as: numbers for learning, and counters such as BatchNorm's.
_DTYPES: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)


def load_best(run: Path) -> dict[str, Any]:
    """Read and check a run's `best.pt`. Raises TrainingError, UsageError for one of a later version."""
    return _load(run / BEST_NAME, _check_best)


def load_last(run: Path) -> dict[str, Any]:
    """Read and check the state in a run's `last.pt`. Raises TrainingError, UsageError for one of a later version."""
    return _load(run / LAST_NAME, _check_last)


def read_values(path: Path, kind: type) -> dict[str, Any]:
    """Return the object in a JSON file, whose values of the fields of a dataclass have their types.

    Raises OSError, and TrainingError for anything else than such an object.
    """
    try:
        content = read_object(read_file(path), path.name).content
        check_types(content, kind, path.name)
    except FormatError as error:
        raise TrainingError(f"{path} cannot be read: {error}. Remove it to continue, or copy the run again") from error
    return content


def check_types(values: Mapping[str, Any], kind: type, where: str) -> None:
    """Raise FormatError unless values have the types of the fields of a dataclass; other names are not looked at."""
    hints = get_type_hints(kind)
    for item in fields_of(kind):
        if item.name in values and not fits(values[item.name], hints[item.name]):
            raise FormatError(f"{where}: {item.name!r} is not of the type {_shown(hints[item.name])}")


def fits(value: object, hint: Any) -> bool:
    """Return whether an untrusted value has a type; sequences may be lists, whole numbers are floats, too."""
    if hint is Any:
        return True
    if hint is float:
        return type(value) in (int, float) and not abs(value) > LARGEST  # type: ignore[arg-type]  # it is a number
    if hint is int:
        return type(value) is int and abs(value) < 1 << 63
    if hasattr(hint, "__dataclass_fields__"):
        parts = get_type_hints(hint).items()
        return isinstance(value, dict) and all(fits(value[name], part) for name, part in parts if name in value)
    return _fits_generic(value, hint) if get_args(hint) else isinstance(value, hint)


def _fits_generic(value: object, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if issubclass(origin, Mapping):
        return isinstance(value, dict) and all(fits(k, parts[0]) and fits(v, parts[1]) for k, v in value.items())
    return isinstance(value, (list, tuple)) and all(fits(each, parts[0]) for each in value)


def _load(path: Path, check: Callable[[JsonObject], None]) -> dict[str, Any]:
    content = load_checkpoint(path)
    try:
        item = JsonObject(_plain(content), path.name)
        if item.content.get("version") != VERSION:
            raise UsageError(f"{path} is of another version of tpucache: give another folder")
        if "precision" not in item.object("settings").content:
            raise UsageError(
                f"{path} was written before version 0.2 of tpucache: use the run with version 0.2, or train again in "
                "another folder"
            )
        _check_metadata(item)
        check(item)
    except FormatError as error:
        raise TrainingError(f"{path} cannot be used: {error}. Copy it again, or train again") from error
    return content


def _plain(content: object) -> Any:
    """Return a checkpoint's content with lists for tuples. Raises FormatError for more than any run has."""
    values = itertools.count()

    def copied(value: object, depth: int) -> Any:
        # A pickle of a few bytes may hold one list many times in another one, and that one again.
        if depth > _MAX_NESTING or next(values) > _MAX_VALUES:
            raise FormatError(f"it holds more than {_MAX_VALUES:,} values, or nests deeper than {_MAX_NESTING} levels")
        if isinstance(value, dict):
            return {key: copied(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [copied(inner, depth + 1) for inner in value]
        return value

    return copied(content, 0)


def _check_metadata(item: JsonObject) -> None:
    """Raise FormatError unless a checkpoint says what the run learned from, and how, as `files` writes it."""
    settings = item.object("settings")
    check_types(settings.content, TrainSettings, settings.where)
    check_types(settings.object("augment").content, AugmentSettings, f"{settings.where}.augment")
    try:
        settings_from(settings.content)
    except TypeError as error:  # settings that have to be given are missing
        raise FormatError(f"{settings.where}: {error}") from error
    item.string("task")
    item.integer("outputs", 1, _MAX_OUTPUTS)
    item.strings("classes")
    item.integer("samples", 0, MAX_SAMPLES)
    item.string("fingerprint")
    fields = [read_field(each) for each in item.objects("fields", MAX_FIELDS)]
    channels = next((field.shape[2] for field in fields if field.name == IMAGE), None)
    mean, std = item.floats("mean"), item.floats("std")
    if len(mean) != len(std) or (channels is not None and len(mean) != channels):
        raise FormatError(
            f"{item.where}: 'mean' and 'std' are not of {channels} channels, but {len(mean)} and {len(std)}"
        )
    if not all(map(math.isfinite, mean)) or not all(0 < spread < math.inf for spread in std):
        raise FormatError(f"{item.where}: 'mean' and 'std' are not finite, with every 'std' above 0")
    if not fits(item.content.get("digests"), dict[str, str | None]):
        raise FormatError(f"{item.where}: 'digests' are no texts by name")
    for column in item.objects("columns", _MAX_COLUMNS) if "columns" in item.content else ():
        column.string("name")
        column.get("names", (list, tuple))
        if not all(isinstance(name, str) for name in column.content["names"]):
            raise FormatError(f"{column.where}: 'names' are no texts")
        if not (fits(column.content.get("mean"), float) and math.isfinite(column.content["mean"])):
            raise FormatError(f"{column.where}: 'mean' is no finite number")
        if not (fits(column.content.get("std"), float) and 0 < column.content["std"] < math.inf):
            raise FormatError(f"{column.where}: 'std' is no finite number above 0")


def _check_best(item: JsonObject) -> None:
    _check_tensors(item.object("model").content, f"{item.where}.model")


def _check_last(item: JsonObject) -> None:
    state = item.object("stand")
    check_types(state.content, RunState, state.where)
    if unknown := {*state.content} - {each.name for each in fields_of(RunState)}:
        raise FormatError(f"{state.where}: {sorted(map(str, unknown))[0][:60]!r} is no part of a state")
    if state.integer("steps", 0, 1 << 48) != len(state.get("losses", list)):
        raise FormatError(f"{state.where}: there are not as many losses as steps")
    learner = item.object("learner")
    _check_tensors(learner.object("model").content, f"{learner.where}.model")
    if "scaler" in learner.content and not _is_scaler(learner.content["scaler"]):
        raise FormatError(f"{learner.where}: 'scaler' holds something else than positive numbers by name")


def _is_scaler(values: object) -> bool:
    return fits(values, dict[str, float]) and all(value >= 0 for value in values.values())  # type: ignore[attr-defined]


def _check_tensors(tensors: Mapping[Any, Any], where: str) -> None:
    """Raise FormatError unless these are dense tensors by name, each with as many bytes as it takes."""
    if not tensors:
        raise FormatError(f"{where} has no tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise FormatError(f"{where} holds something else than tensors by name")
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPES or tensor.device.type != "cpu":
            raise FormatError(f"{where}: {name[:60]!r} is a tensor of {tensor.dtype}, {tensor.layout}")
        if not is_stored_whole(tensor):
            raise FormatError(f"{where}: {name[:60]!r} is larger than its values in the file")


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "").replace("collections.abc.", "")
