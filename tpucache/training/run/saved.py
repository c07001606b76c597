"""A trained model in a run's folder: the file `best.pt` has its weights, and describes its training data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from tpucache.errors import TrainingError, UsageError
from tpucache.loading.columns import Columns, columns_from
from tpucache.runs import BEST_NAME, LAST_NAME
from tpucache.store.fields import IMAGE
from tpucache.training.learn.model import build_model, is_user_code
from tpucache.training.learn.tasks.find import make_task
from tpucache.training.learn.tasks.task import Task
from tpucache.training.run.contents import load_best
from tpucache.training.settings import TrainSettings, settings_from

#: The dtype and shape of a field.
FieldKind = tuple[str, tuple[int, ...]]

_SHOWN: Final = 300  # characters of a library's message, at most


@dataclass(frozen=True)
class SavedRun:
    """The best weights of a run, from the content of its `best.pt`."""

    folder: Path
    content: Mapping[str, Any]

    @functools.cached_property
    def settings(self) -> TrainSettings:
        """The settings of the run."""
        return settings_from(self.content["settings"])

    @functools.cached_property
    def task(self) -> Task:
        """The task, with its loss and its constants from the labels. Raises TrainingError if these do not fit."""
        task, constants = make_task(self.content["task"], self.content["outputs"]), self.content.get("labels", {})
        try:
            return (task if self.settings.own_loss else task.with_loss(self.settings.loss)).with_constants(constants)
        except UsageError as error:
            raise TrainingError(f"{self._path} cannot be used: {error}. Copy it again, or train again") from error

    @functools.cached_property
    def columns(self) -> Columns:
        """The columns of the samples table that the model takes, and how they were encoded in training."""
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
        """The dtype and shape of each field of the training records, by name."""
        return {field["name"]: (field["dtype"], tuple(field["shape"])) for field in self.content["fields"]}

    @property
    def inputs(self) -> dict[str, FieldKind]:
        """The fields that the model takes, by name, with their dtype and shape. Labels are not among them.

        If there is an image, it is the only field, unless the run has an evaluation step of the user's.
        """
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
        """Return the model with its weights, on the host; `build` makes a model that was given to `train` as an object.

        Raises TrainingError if the weights do not fit the model.
        """
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
    """Return the best weights of the run in a folder. Raises TrainingError if there are none."""
    if (run / BEST_NAME).exists():
        return SavedRun(run, load_best(run))
    if (run / LAST_NAME).exists():
        raise TrainingError(
            f"{run} has no {BEST_NAME}, as no epoch of the run has ended: continue the run with train --resume first"
        )
    raise TrainingError(f"{run} holds no run: give the folder that `train --run` named")
