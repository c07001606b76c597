"""What is added to a cache, finished or interrupted, comes from the same samples by the same code."""

from __future__ import annotations

import contextlib
import gc
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from joblib.externals.loky import get_reusable_executor
from made import build_here, digests, write_photos
from thorough import thorough

from tpucache.errors import BuildError, RecipeError, SourceError
from tpucache.recipe import Recipe
from tpucache.store.verify import verify_cache
from tpucache.warmup import library_versions
from tpucache.warmup.build import build_cache
from tpucache.warmup.code_digest import code_digests
from tpucache.warmup.plan import resolve
from tpucache.warmup.records import augment, presize
from tpucache.warmup.records.encode import SampleEncoder

pytestmark = pytest.mark.slow


_MODULE = """
import numpy as np
import roller_by_test.strength
def roll(image, generator):
    def later():
        from roller_by_test import unused
    return np.roll(image, int(generator.integers(1, 9)) * roller_by_test.strength.FACTOR, 1)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", 80, size=(40, 30))


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "modules"
    (folder / "roller_by_test").mkdir(parents=True)
    (folder / "roll_by_test.py").write_text(_MODULE)
    (folder / "roller_by_test" / "__init__.py").write_text("")
    (folder / "roller_by_test" / "unused.py").write_text("from .strength import FACTOR\n")
    (folder / "roller_by_test" / "strength.py").write_text("FACTOR = 1\n")
    monkeypatch.syspath_prepend(folder)
    _forget()
    get_reusable_executor().shutdown(wait=True)  # an earlier test's workers do not know this folder
    return folder


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("roll_by_test", "roller_by_test")]:
        del sys.modules[name]
    augment.build_function.cache_clear()


def _change(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    shutil.rmtree(folder / "roller_by_test" / "__pycache__", ignore_errors=True)


def _negative(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: 255 - array for name, array in arrays.items()}


def _interrupt() -> None:
    raise KeyboardInterrupt


def _begin(source: Path, cache: Path, recipe: Recipe) -> None:
    with pytest.raises(KeyboardInterrupt):
        build_here(source, cache, recipe, check=_interrupt)


@pytest.mark.parametrize("which", [*thorough(0, 41), 79])
def test_variants_of_a_file_that_changed_at_equal_size_are_refused_and_it_is_named(
    source: Path, jitter: str, tmp_path: Path, which: int
) -> None:
    cache = tmp_path / "cache"
    build_here(source, cache, Recipe(size=16))
    before = digests(cache)
    paths = sorted(source.rglob("*.jpg"))
    size = paths[which].stat().st_size
    other = next(path.read_bytes() for path in paths if path.stat().st_size <= size and path != paths[which])
    paths[which].write_bytes(other + bytes(size - len(other)))
    with pytest.raises(BuildError, match=rf"{paths[which].name}.*the clean record.*source or its code has changed"):
        build_here(source, cache, Recipe(size=16, variants=1, augment=jitter), on_error="skip")
    assert before.items() <= digests(cache).items()
    assert verify_cache(cache) == []


@pytest.mark.parametrize("codec", [*thorough("raw"), "jpeg"])
def test_variants_by_libraries_that_make_other_pixels_are_refused(
    source: Path, jitter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Any
) -> None:
    cache = tmp_path / "cache"
    build_here(source, cache, Recipe(size=16, codec=codec))
    real = SampleEncoder.to_record
    monkeypatch.setattr(SampleEncoder, "to_record", lambda encoder, arrays: real(encoder, _negative(arrays)))
    monkeypatch.setattr(presize, "resizer_versions", lambda: {"cykooz_resizer": "99.0"})
    with pytest.raises(
        BuildError, match=r"the clean record.*made with other versions.*cykooz_resizer.*99\.0.*use those"
    ):
        build_here(source, cache, Recipe(size=16, codec=codec, variants=1, augment=jitter))


def test_an_interrupted_run_is_not_finished_by_libraries_that_make_other_pixels_or_from_other_samples(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, recipe = tmp_path / "cache", Recipe(size=16)
    _begin(source, cache, recipe)
    real = SampleEncoder.to_record
    with monkeypatch.context() as patch:
        patch.setattr(SampleEncoder, "to_record", lambda encoder, arrays: real(encoder, _negative(arrays)))
        patch.setattr(presize, "resizer_versions", lambda: {"cykooz_resizer": "99.0"})
        with pytest.raises(BuildError, match=r"the clean record.*made with other versions.*cykooz_resizer"):
            build_here(source, cache, recipe)
    photo = min(source.rglob("*.jpg"))
    data = photo.read_bytes()
    photo.write_bytes(data + b"x")
    with pytest.raises(SourceError, match=f"another size than when their records .*{photo.name}"):
        build_here(source, cache, recipe)
    photo.write_bytes(data)
    assert build_here(source, cache, recipe).samples == 80


@pytest.mark.parametrize("name", ["strength", *thorough("unused", "__init__")])
def test_a_changed_helper_of_an_augmentation_is_refused_and_named(
    source: Path, modules: Path, tmp_path: Path, name: str
) -> None:
    cache, recipe = tmp_path / "cache", Recipe(size=16, variants=1, augment="roll_by_test:roll")
    build_here(source, cache, recipe)
    _change(modules, f"roller_by_test/{name}.py", "FACTOR = 2\n")
    _forget()
    changed = "roller_by_test" + ("" if name == "__init__" else f".{name}")
    for variants in (1, 2):
        with pytest.raises(
            RecipeError, match=rf"the code of the augmentation roll_by_test:roll changed, in {changed}\."
        ):
            build_here(source, cache, Recipe(size=16, variants=variants, augment=recipe.augment))


@pytest.mark.thorough
def test_an_interrupted_run_is_not_finished_with_a_changed_helper(source: Path, modules: Path, tmp_path: Path) -> None:
    cache, recipe = tmp_path / "cache", Recipe(size=16, variants=1, augment="roll_by_test:roll")
    _begin(source, cache, recipe)
    _change(modules, "roller_by_test/strength.py", "FACTOR = 2\n")
    _forget()
    with pytest.raises(RecipeError, match=r"changed, in roller_by_test\.strength"):
        build_here(source, cache, recipe)


def test_what_an_augmentation_reads_from_a_file_is_not_mixed_either(
    source: Path, modules: Path, tmp_path: Path
) -> None:
    (modules / "factor.txt").write_text("1")
    _change(
        modules,
        "roller_by_test/strength.py",
        f"import pathlib\nFACTOR = int(pathlib.Path({str(modules / 'factor.txt')!r}).read_text())\n",
    )
    cache = tmp_path / "cache"
    build_here(source, cache, Recipe(size=16, variants=1, augment="roll_by_test:roll"))
    (modules / "factor.txt").write_text("2")
    _forget()
    with pytest.raises(BuildError, match=r"variant 1 is not the same as in .*augmentation has changed"):
        build_here(source, cache, Recipe(size=16, variants=2, augment="roll_by_test:roll"))


@pytest.mark.parametrize("jobs", [1, *thorough(2)])
def test_code_that_changed_after_it_was_imported_is_not_taken_for_what_it_is_now(
    source: Path, modules: Path, tmp_path: Path, jobs: int
) -> None:
    recipe = Recipe(size=16, variants=1, augment="roll_by_test:roll")
    build_cache(source, tmp_path / "one", recipe, jobs=jobs)
    _change(modules, "roller_by_test/strength.py", "FACTOR = 2\n")
    with pytest.raises(RecipeError, match=r"roller_by_test\.strength changed after this process imported it.*restart"):
        build_cache(source, tmp_path / "other", recipe, jobs=jobs)
    _forget()
    expected = build_here(source, tmp_path / "expected", recipe).shards
    with contextlib.suppress(RecipeError):  # workers that are used again have the code as it was
        assert build_cache(source, tmp_path / "other", recipe, jobs=jobs).shards == expected


def test_installed_modules_and_pythons_own_are_no_helpers(modules: Path) -> None:
    found = code_digests("roll_by_test:roll")
    assert sorted(found["helpers"]) == ["roller_by_test", "roller_by_test.strength", "roller_by_test.unused"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = dict.fromkeys(("numpy", "lmdb", "joblib", "albumentations", "pillow-heif", "pydicom"), "1.0")

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(library_versions, "version", version)
    return found


def test_an_augmentation_library_in_place_of_another_is_recorded(installed: dict[str, str]) -> None:
    before = library_versions.versions()
    assert before["albumentations"] == "1.0"
    assert "nrtk-albumentations" not in before  # so that manifests are those of machines that know one library
    del installed["albumentations"]
    installed["nrtk-albumentations"] = "2.3.0"
    now = library_versions.versions()
    assert (now["albumentations"], now["nrtk-albumentations"]) == ("", "2.3.0")
    assert library_versions.version_differences(before) == [
        "albumentations 1.0, now none",
        "nrtk-albumentations none, now 2.3.0",
    ]


@pytest.mark.parametrize("name", ["flip", "strong"])
def test_a_preset_has_no_key_that_one_library_alone_writes(name: str) -> None:
    assert "seed" not in resolve(name, 16, 16)["transform"]


_THREADS = 4


@pytest.fixture
def eager_switches() -> Iterator[None]:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()

    def collected(*_: object) -> None:
        for _ in range(10):
            pass

    gc.callbacks.append(collected)
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(collected)


@pytest.mark.usefixtures("eager_switches")
def test_threads_digest_the_code_of_a_callable_at_the_same_time(write_module: Callable[[str, str], None]) -> None:
    write_module("helper_by_test", "values = [" + "1 + (2 * (3 - 4)), " * 50 + "]\n")
    write_module("digested_by_test", "import helper_by_test\ndef same(image, generator):\n    return image\n")
    expected = code_digests("digested_by_test:same")
    start = threading.Barrier(_THREADS)

    def work(_: int) -> list[Any]:
        start.wait()
        return [code_digests("digested_by_test:same") for _ in range(20)]

    with ThreadPoolExecutor(_THREADS) as pool:
        assert [*pool.map(work, range(_THREADS))] == [[expected] * 20] * _THREADS
    assert set(expected["helpers"]) == {"helper_by_test"}
