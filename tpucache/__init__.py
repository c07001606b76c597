"""Decode, resize and augment once; then read batches at memory speed, so that the accelerator never waits.

What people use most. Training is in `tpucache.training`, sources are in `tpucache.warmup`, errors in `tpucache.errors`.
Importing this loads nothing: each name is imported when it is first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpucache.imports import lazy_names
from tpucache.version import __version__

if TYPE_CHECKING:
    from tpucache.errors import (
        BuildError as BuildError,
        DamageError as DamageError,
        DependencyError as DependencyError,
        FormatError as FormatError,
        NotACacheError as NotACacheError,
        OutOfRangeError as OutOfRangeError,
        PublishError as PublishError,
        RecipeError as RecipeError,
        SampleError as SampleError,
        SourceError as SourceError,
        StoreError as StoreError,
        TpucacheError as TpucacheError,
        TrainingError as TrainingError,
        UnfinishedError as UnfinishedError,
        UsageError as UsageError,
    )
    from tpucache.loading.dataset import CachedDataset
    from tpucache.loading.find import find_cache
    from tpucache.loading.loader import CachedLoader
    from tpucache.loading.mixing.loader import MixedLoader
    from tpucache.recipe import Recipe
    from tpucache.report.cache_page import report_cache
    from tpucache.report.run_page import report_run
    from tpucache.report.preview import preview_cache
    from tpucache.store.copying.stage import stage_cache
    from tpucache.store.manifest import Manifest
    from tpucache.store.verify import Damage, verify_cache
    from tpucache.warmup.build import build_cache
    from tpucache.warmup.repair import repair_cache

# Errors are public in `tpucache.errors`; here they can be imported, too, as they always could.
_ERRORS: Final = (
    "BuildError DamageError DependencyError FormatError NotACacheError OutOfRangeError PublishError RecipeError "
    "SampleError SourceError StoreError TpucacheError TrainingError UnfinishedError UsageError"
)
_HOMES: Final = {
    "CachedDataset": "tpucache.loading.dataset",
    "CachedLoader": "tpucache.loading.loader",
    "Damage": "tpucache.store.verify",
    "MixedLoader": "tpucache.loading.mixing.loader",
    "Manifest": "tpucache.store.manifest",
    "Recipe": "tpucache.recipe",
    "build_cache": "tpucache.warmup.build",
    "find_cache": "tpucache.loading.find",
    "preview_cache": "tpucache.report.preview",
    "repair_cache": "tpucache.warmup.repair",
    "report_cache": "tpucache.report.cache_page",
    "report_run": "tpucache.report.run_page",
    "stage_cache": "tpucache.store.copying.stage",
    "verify_cache": "tpucache.store.verify",
    **dict.fromkeys(_ERRORS.split(), "tpucache.errors"),
}

__all__ = [
    "CachedDataset",
    "CachedLoader",
    "Damage",
    "Manifest",
    "MixedLoader",
    "Recipe",
    "__version__",
    "build_cache",
    "find_cache",
    "preview_cache",
    "repair_cache",
    "report_cache",
    "report_run",
    "stage_cache",
    "verify_cache",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
