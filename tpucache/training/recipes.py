"""Training recipes by name: settings that go together for a kind of run.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tpucache.errors import UsageError
from tpucache.ondevice.settings import AugmentSettings
from tpucache.training.settings import AUTO, RecipeName, TrainSettings


@dataclass(frozen=True)
class TrainingRecipe:
    """A recipe: the settings and augmentations in which it differs from the defaults, by name.

    `summary` says what it is good for. `mix_off` is the share of the epochs, at the end of the run, that do not mix
    images. All other settings follow from data, task, model and weights, as they do without a recipe. With
    `needs_weights`, the setting `weights` must be given.
    """

    summary: str
    settings: Mapping[str, Any]
    augment: Mapping[str, Any]
    mix_off: float = 0.0
    needs_weights: bool = False

    def values(self, given: Collection[str], epochs: Any = None) -> dict[str, Any]:
        """Return the recipe's settings for a run of `epochs` epochs, without the settings named in `given`.

        `epochs` may be "auto". If it is None, the number of epochs is the recipe's own.
        """
        values = dict(self.settings)
        if self.mix_off:
            epochs = values["epochs"] if epochs is None else epochs
            values["mix_off"] = self.mix_off if epochs == AUTO else round(self.mix_off * epochs)
        return {name: value for name, value in values.items() if name not in given}

    def augmentations(self, given: Collection[str]) -> dict[str, Any]:
        """Return the recipe's augmentations, without those that are named in `given` or replaced by a given one.

        `crop` replaces `zoom`, and `trivial_augment` replaces `rand_augment`.
        """
        left = {
            *given,
            *(["zoom"] if "crop" in given else []),
            *(["rand_augment"] if "trivial_augment" in given else []),
        }
        return {name: value for name, value in self.augment.items() if name not in left}


#: The recipes that `--recipe` names.
RECIPES: Final[Mapping[RecipeName, TrainingRecipe]] = {
    "quick": TrainingRecipe(
        "a first result within minutes, from random weights",
        {"epochs": 5, "precision": "mixed"},
        {"flip": True},
    ),
    "finetune": TrainingRecipe(
        "from pretrained weights, for most data and models",
        {
            "epochs": 10,
            "optimizer": "adamw",
            "layer_decay": 0.75,
            "smoothing": 0.1,
            "clip": 1.0,
            "ema": 0.999,
            "precision": "mixed",
        },
        {"flip": True, "crop": True, "zoom": 0.35},
        needs_weights=True,
    ),
    "scratch": TrainingRecipe(
        "a convolutional network from random weights",
        {"epochs": 40, "smoothing": 0.1, "ema": 0.999, "precision": "mixed"},
        {"flip": True, "crop": True, "zoom": 0.35, "mixup": 0.2},
        mix_off=0.2,
    ),
    "vit": TrainingRecipe(
        "a vision transformer or ConvNeXt from random weights, as DeiT (arXiv:2012.12877)",
        {
            "epochs": 100,
            "optimizer": "adamw",
            "schedule": "warmup-cosine",
            "smoothing": 0.1,
            "clip": 1.0,
            "ema": 0.999,
            "precision": "mixed",
        },
        {
            "flip": True,
            "crop": True,
            "zoom": 0.2,
            "rand_augment": 2,
            "erase": 0.25,
            "mixup": 0.8,
            "cutmix": 1.0,
        },
        mix_off=0.1,
    ),
}


def find_recipe(name: str) -> TrainingRecipe:
    """Return a recipe by its name. Raises UsageError for an unknown name."""
    found = {str(known): recipe for known, recipe in RECIPES.items()}.get(name)
    if found is None:
        raise UsageError(f"there is no recipe {name!r}: use {', '.join(RECIPES)}")
    return found


def recipe_settings(name: str, augment: Mapping[str, Any] | None = None, **given: Any) -> TrainSettings:
    """Return the settings of a recipe, `quick`, `finetune`, `scratch` or `vit`.

    `given` replaces settings of the recipe, and `augment` its augmentations, by their names in AugmentSettings. Raises
    UsageError for an unknown recipe or setting, and for a recipe that needs weights without `weights`.
    """
    recipe, augment = find_recipe(name), augment or {}
    if recipe.needs_weights and given.get("weights") is None:
        raise UsageError(f"the recipe {name} begins with trained weights: give --weights, such as pretrained")
    values, augmentations = recipe.values(given, given.get("epochs")), recipe.augmentations(augment)
    try:
        all_augmentations = AugmentSettings(**augmentations, **augment)
        if not all_augmentations.mixes:
            values.pop("mix_off", None)
        return TrainSettings(
            **values, **given, augment=all_augmentations, recipe=_describe(name, values | augmentations)
        )
    except TypeError as error:  # a name that is no setting
        raise UsageError(f"the recipe {name} cannot be used: {error}") from error


def _describe(name: str, values: Mapping[str, Any]) -> str:
    shown = (f"{key} {value}" if value is not True else key for key, value in values.items())
    return f"{name}: {', '.join(text.replace('_', '-') for text in shown)}"
