"""The public names are exactly these, and importing them loads no more than they need."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tpucache

NAMES = [
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


def loaded_after(statement: str, *names: str) -> list[str]:
    """Return which of the named modules a fresh Python has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*(name for name in {names!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_public_names_are_exactly_these() -> None:
    assert tpucache.__all__ == NAMES
    assert dir(tpucache) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(tpucache, name)
    assert value.__doc__
    if name != "__version__":
        assert value.__name__ == name


def test_any_other_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tpucache' has no attribute 'CachedDataSet'"):
        _ = tpucache.CachedDataSet


def test_every_error_is_public() -> None:
    kinds = [tpucache.TpucacheError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.__name__ for kind in kinds if kind.__module__ == "tpucache.errors"} <= set(NAMES)


def test_importing_tpucache_loads_nothing_heavy() -> None:
    assert loaded_after("import tpucache", "numpy", "torch", "torch_xla", "lmdb", "PIL", "albumentations") == []


def test_warmup_leaves_torch_unloaded() -> None:
    assert loaded_after("import tpucache.warmup.build", "torch", "torch_xla", "tpucache.loading") == []


def test_reading_records_loads_numpy_alone() -> None:
    names = ("numpy", "torch", "lmdb", "PIL", "zstandard", "albumentations", "joblib")
    assert loaded_after("from tpucache import Manifest, Recipe, verify_cache", *names) == ["numpy"]


def test_loading_needs_no_lmdb_and_no_image_library() -> None:
    names = ("numpy", "torch", "lmdb", "PIL", "albumentations", "torch_xla", "tpucache.warmup")
    assert loaded_after("from tpucache import CachedDataset, CachedLoader", *names) == ["numpy", "torch"]
