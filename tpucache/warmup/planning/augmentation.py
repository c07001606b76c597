"""What an augmentation means in full, as it is written into the manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import RecipeError
from tpucache.recipe import Recipe
from tpucache.store.fields import BOXES, IMAGE, Field
from tpucache.store.files import read_text
from tpucache.store.manifest import Manifest
from tpucache.strict_json import parse_json
from tpucache.warmup.code_digest import code_changes, code_digests
from tpucache.warmup.records.arrays import image_fields
from tpucache.warmup.records.augment import PRESETS, augment_fields, preset
from tpucache.warmup.versions import versions

#: The libraries whose versions decide what a preset means.
_PRESET_LIBRARIES: Final = ("tpucache", "albumentations")
_TRIALS: Final = 4

Array = npt.NDArray[Any]


def resolve(name: str, height: int, width: int, fields: Sequence[Field] = ()) -> dict[str, Any]:
    """Return what an `--augment` value means, in full, as JSON values: what the manifest and the fingerprint hold.

    `name` is a preset, a YAML or JSON file of `albumentations.to_dict`, or `module:name` of a callable. It is tried on
    an empty record of `fields`, or else on a black image. Raises RecipeError when it means nothing, does not make
    (height, width, 3) of (height, width, 3), and of the other fields what they were, or makes something else each time.
    """
    if name in PRESETS:
        definition: dict[str, Any] = _plain(preset(name, height, width, has_colours=_has_colours(fields)))
    elif name.endswith((".json", ".yaml", ".yml")):
        definition = _read_file(Path(name))
    elif ":" in name:
        definition = {"callable": name, **code_digests(name)}
    else:
        raise RecipeError(
            f"there is no augmentation {name!r}: use one of {', '.join(PRESETS)}, a .yaml or .json file of "
            "albumentations.to_dict, or module:name of a callable"
        )
    fields = fields or (Field(IMAGE, "raw", "|u1", (height, width, 3)),)
    blank = {field.name: np.full(field.shape, -(field.name == BOXES), field.dtype) for field in fields}
    augment_fields(blank, definition, 0, 0, 1)
    if name not in PRESETS:
        _check_reproducible(name, blank, definition)
    return definition


def _has_colours(fields: Sequence[Field]) -> bool:
    """Return whether the images of records are 8-bit grey or RGB, whose colours albumentations can change."""
    return all(field.dtype == "|u1" and field.shape[2] in (1, 3) for field in fields if field.name == IMAGE)


def full_augmentation(recipe: Recipe, fields: Sequence[Field], before: Manifest | None = None) -> dict[str, Any]:
    """Return a recipe's augmentation in full, as JSON values: that of the finished cache where it cannot differ."""
    if not recipe.variants:
        return dict(before.recipe["augmentation"]) if before else {}
    if before is not None and before.augmented and recipe.augment in PRESETS:
        used = versions()
        asked = (recipe.augment, list(recipe.to_dict()["size"]), *(used[name] for name in _PRESET_LIBRARIES))
        made = (before.recipe.get("augment"), before.recipe.get("size"))
        if asked == (*made, *(before.created_by.get(name) for name in _PRESET_LIBRARIES)):
            found = dict(before.recipe["augmentation"])
            if "callable" in found:  # code that the user did not name
                raise RecipeError(
                    f"the manifest says that the preset {recipe.augment} is the code {found['callable']!r}, which no "
                    "tpucache writes: build the cache anew"
                )
            return found
    old = before.recipe["augmentation"] if before is not None else {}
    if old.get("callable") == recipe.augment:
        now = {"callable": recipe.augment, **code_digests(recipe.augment)}
        return (
            now if code_changes(old, now) else dict(old)
        )  # an earlier version may have recorded less of the same code
    return resolve(recipe.augment, recipe.height, recipe.width, fields)


def _check_reproducible(name: str, record: Mapping[str, Array], definition: Mapping[str, Any]) -> None:
    """Raise RecipeError when a few calls on the same samples do not return the same arrays."""
    if not image_fields(record):
        return
    noise = np.random.default_rng(0).integers(0, 256, record[IMAGE].shape, np.uint8).astype(record[IMAGE].dtype)
    passes = [
        [augment_fields({**record, IMAGE: noise}, definition, 0, number, 1) for number in range(_TRIALS)]
        for _ in range(2)
    ]
    for first, second in zip(*passes, strict=True):
        if not all(np.array_equal(first[field], second[field]) for field in first):
            raise RecipeError(
                f"the augmentation {name} makes something else of the same image each time it is called: draw all "
                "random numbers from the generator that it is given, and keep nothing from one call to the next"
            )


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the augmentation file {path} cannot be read: {error}") from error
    try:
        content = _plain(parse_json(text) if path.suffix == ".json" else _parse_yaml(text))
    except Exception as error:  # yaml's errors share no base with json's
        raise RecipeError(f"{path} is no {path.suffix[1:]}: {error}") from error
    if not isinstance(content, dict) or "transform" not in content:
        raise RecipeError(f"{path} holds no augmentation: write albumentations.to_dict(pipeline) into it")
    return content


def _parse_yaml(text: str) -> Any:
    """Return what a YAML text says. Raises ValueError where a key is there twice, of which yaml takes the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            if twice := [key for key, times in keys.items() if times > 1]:
                raise ValueError(f"the key {twice[0]!r:.60} is there twice in one mapping: leave one of the two")
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)  # noqa: S506  # a SafeLoader


def _plain(content: Any) -> Any:
    """Return what JSON makes of it, tuples as lists: a definition has to equal the one read back from a manifest."""
    return json.loads(json.dumps(content))
