"""Decode, resize and augment once; then read batches at memory speed, so that the accelerator never waits.

Importing this loads nothing: each name is fetched when it is first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tpucache.errors import (
        BuildError,
        DamageError,
        DependencyError,
        FormatError,
        NotACacheError,
        PublishError,
        RecipeError,
        SampleError,
        SourceError,
        StoreError,
        TpucacheError,
        TrainingError,
        UnfinishedError,
        UsageError,
    )
    from tpucache.loading.dataset import CachedDataset
    from tpucache.loading.find import find_cache
    from tpucache.loading.loader import CachedLoader
    from tpucache.recipe import Recipe
    from tpucache.report.page.page import report_cache
    from tpucache.report.preview import preview_cache
    from tpucache.store.copying.stage import stage_cache
    from tpucache.store.manifest import Manifest
    from tpucache.store.verify import Damage, verify_cache
    from tpucache.warmup.build import build_cache
    from tpucache.warmup.repair import repair_cache

__version__ = "0.1.0"

_ERRORS: Final = (
    "BuildError DamageError DependencyError FormatError NotACacheError PublishError RecipeError SampleError "
    "SourceError StoreError TpucacheError TrainingError UnfinishedError UsageError"
)
_HOMES: Final = {
    "CachedDataset": "loading.dataset",
    "CachedLoader": "loading.loader",
    "find_cache": "loading.find",
    "Recipe": "recipe",
    "report_cache": "report.page.page",
    "preview_cache": "report.preview",
    "Manifest": "store.manifest",
    "stage_cache": "store.copying.stage",
    "Damage": "store.verify",
    "verify_cache": "store.verify",
    "build_cache": "warmup.build",
    "repair_cache": "warmup.repair",
    **dict.fromkeys(_ERRORS.split(), "errors"),
}

__all__ = [
    "BuildError",
    "CachedDataset",
    "CachedLoader",
    "Damage",
    "DamageError",
    "DependencyError",
    "FormatError",
    "Manifest",
    "NotACacheError",
    "PublishError",
    "Recipe",
    "RecipeError",
    "SampleError",
    "SourceError",
    "StoreError",
    "TpucacheError",
    "TrainingError",
    "UnfinishedError",
    "UsageError",
    "__version__",
    "build_cache",
    "find_cache",
    "preview_cache",
    "repair_cache",
    "report_cache",
    "stage_cache",
    "verify_cache",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
