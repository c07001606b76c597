"""Whether a recipe makes the records that a cache has already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpucache.errors import RecipeError
from tpucache.recipe import differences
from tpucache.store.manifest import Manifest
from tpucache.warmup.code_digest import code_changes


def check_recipe(cache: Path, manifest: Manifest, recipe: Mapping[str, Any]) -> None:
    """Raise RecipeError when a recipe, with its augmentation in full, makes other records than a finished cache has."""
    old = {**manifest.recipe}
    if not manifest.augmented:  # nothing was augmented yet, so any augmentation fits
        old.update(augmentation=recipe["augmentation"], augment=recipe["augment"])
    changed = recipe_differences(old, recipe)
    if recipe["variants"] < manifest.augmented:
        changed.append(f"variants {manifest.augmented}, now {recipe['variants']}")
    if changed:
        raise RecipeError(
            f"{cache} was made with another recipe: {'; '.join(changed)}. "
            "Give the same options, or another folder to build anew."
        )


def recipe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name each part in which two recipes differ; of a callable's code, the modules that changed."""
    old, new = before.get("augmentation", {}), now.get("augmentation", {})
    if not old.get("callable") or old.get("callable") != new.get("callable"):
        return differences(before, now)
    modules = code_changes(old, new)
    code = [f"the code of the augmentation {new['callable']} changed, in {', '.join(modules)}"] if modules else []
    return [*differences({**before, "augmentation": new}, now), *code]
