"""Decode, resize and augment once; then read batches at memory speed, so that the accelerator never waits.

What people use most. Training is in `tpucache.training`, sources are in `tpucache.warmup`, errors in `tpucache.errors`.
Importing this loads nothing: each name is imported when it is first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpucache.lazy import lazy_names

if TYPE_CHECKING:
    # isort: off  # it would write a statement for each name
    from tpucache.errors import (
        BuildError as BuildError,
    )
    from tpucache.errors import (
        DamageError as DamageError,
    )
    from tpucache.errors import (
        DependencyError as DependencyError,
    )
    from tpucache.errors import (
        FormatError as FormatError,
    )
    from tpucache.errors import (
        NotACacheError as NotACacheError,
    )
    from tpucache.errors import (
        PublishError as PublishError,
    )
    from tpucache.errors import (
        RecipeError as RecipeError,
    )
    from tpucache.errors import (
        SampleError as SampleError,
    )
    from tpucache.errors import (
        SourceError as SourceError,
    )
    from tpucache.errors import (
        StoreError as StoreError,
    )
    from tpucache.errors import (
        TpucacheError as TpucacheError,
    )
    from tpucache.errors import (
        TrainingError as TrainingError,
    )
    from tpucache.errors import (
        UnfinishedError as UnfinishedError,
    )
    from tpucache.errors import (
        UsageError as UsageError,
    )

    # isort: on
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

# Errors are public in `tpucache.errors`; here they can be imported, too, as they always could.
_ERRORS: Final = (
    "BuildError DamageError DependencyError FormatError NotACacheError PublishError RecipeError SampleError "
    "SourceError StoreError TpucacheError TrainingError UnfinishedError UsageError"
)
_HOMES: Final = {
    "CachedDataset": "tpucache.loading.dataset",
    "CachedLoader": "tpucache.loading.loader",
    "Damage": "tpucache.store.verify",
    "Manifest": "tpucache.store.manifest",
    "Recipe": "tpucache.recipe",
    "build_cache": "tpucache.warmup.build",
    "find_cache": "tpucache.loading.find",
    "preview_cache": "tpucache.report.preview",
    "repair_cache": "tpucache.warmup.repair",
    "report_cache": "tpucache.report.page.page",
    "stage_cache": "tpucache.store.copying.stage",
    "verify_cache": "tpucache.store.verify",
    **dict.fromkeys(_ERRORS.split(), "tpucache.errors"),
}

__all__ = [
    "CachedDataset",
    "CachedLoader",
    "Damage",
    "Manifest",
    "Recipe",
    "__version__",
    "build_cache",
    "find_cache",
    "preview_cache",
    "repair_cache",
    "report_cache",
    "stage_cache",
    "verify_cache",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, __all__)
