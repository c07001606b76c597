"""The public names are exactly these, and importing them loads no more than they need."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest
from patience import PATIENCE

import tpucache
from tpucache import errors
from tpucache.plugins import PartTable

NAMES = [
    "CachedDataset",
    "CachedLoader",
    "Damage",
    "ImageFolder",
    "Manifest",
    "MixedLoader",
    "PictureDataset",
    "Recipe",
    "__version__",
    "build_cache",
    "cached",
    "find_cache",
    "from_hf",
    "open_or_build",
    "preview_cache",
    "repair_cache",
    "report_cache",
    "report_findings",
    "report_run",
    "stage_cache",
    "verify_cache",
]
ERRORS = [
    "BuildError",
    "DamageError",
    "DependencyError",
    "FormatError",
    "NoRoomError",
    "NotACacheError",
    "OutOfRangeError",
    "PublishError",
    "RecipeError",
]
ERRORS += [
    "SampleError",
    "SourceError",
    "StoreError",
    "TpucacheError",
    "TrainingError",
    "UnfinishedError",
    "UnknownCodecError",
    "UsageError",
]
#: What users import from the other public modules; these have more besides.
PROMISED = {
    "tpucache.training": (
        "train TrainSettings AugmentSettings RunOptions predict open_device find_lr open_all_folds train_folds"
    ),
    "tpucache.warmup": "build_cache repair_cache Recipe open_source FolderSource TableSource TableOptions",
    "tpucache.ondevice": "decoder Augment Normalise AugmentSettings",
    "tpucache.insight": "hashes pairs groups folds suspects",
}


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


def test_every_error_is_public_and_can_be_imported_from_tpucache_too() -> None:
    kinds = [errors.TpucacheError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert sorted({kind.__name__ for kind in kinds if kind.__module__ == "tpucache.errors"}) == ERRORS
    for name in ERRORS:
        assert getattr(tpucache, name) is getattr(errors, name)


@pytest.mark.parametrize("module", PROMISED)
def test_a_public_module_has_what_users_need_and_every_name_is_documented(module: str) -> None:
    public = importlib.import_module(module)
    assert set(PROMISED[module].split()) <= set(public.__all__)
    assert sorted(dir(public)) == sorted(public.__all__)
    for name in public.__all__:
        value = getattr(public, name)
        if not isinstance(value, (tuple, PartTable)) and not name.endswith("Kind"):
            assert value.__doc__, name
            assert value.__name__ == name


@pytest.mark.parametrize("module", PROMISED)
def test_a_public_name_is_not_that_of_a_module_which_would_take_its_place(module: str) -> None:
    public = importlib.import_module(module)
    assert not {each.name for each in pkgutil.iter_modules(public.__path__)} & set(public.__all__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        # What the package, loading and warmup load is counted in test_work.py.
        *((f"import {module}", []) for module in PROMISED),
        ("import tpucache.warmup.build", ["numpy", "lmdb", "PIL"]),
        ("from tpucache import Manifest, Recipe, verify_cache", ["numpy"]),
    ],
)
def test_an_import_loads_nothing_else_that_is_heavy(statement: str, loaded: list[str]) -> None:
    names = ("numpy", "torch", "lmdb", "PIL", "zstandard", "albumentations", "joblib", "torch_xla", "tpucache.loading")
    code = f"import sys\n{statement}\nprint(*(name for name in {names!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.stdout.split(), done.stderr) == (loaded, "")
