"""Synthetic photographs, folders of them, and what tests compare caches by."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import importlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from disk import disk
from joblib.externals.loky import get_reusable_executor
from patience import PATIENCE
from PIL import Image

from tpucache import Recipe, build_cache
from tpucache.warmup.plan import resolve
from tpucache.warmup.records.pillow import find_simplejpeg
from tpucache.warmup.records.presize import find_cykooz_resizer

Pixels = npt.NDArray[np.uint8]
_ORIENTATION = 0x0112

__all__ = ["disk"]


def _smooth_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Draw detail at every scale, as photographs have it, so that a shift of half a pixel shows."""
    rng = np.random.default_rng([seed, width, height])
    total = np.zeros((height, width, 3))
    for octave in range(8):
        cells = rng.integers(0, 256, (2 << octave, 3 << octave, 3), np.uint8)
        layer = Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)
        total += (np.asarray(layer, np.float64) - 128) / 1.4**octave
    return Image.fromarray(np.clip(total * 0.4 + 128, 0, 255).astype(np.uint8))


def _encode(image: Image.Image, file_format: str = "JPEG", orientation: int | None = None, **options: Any) -> bytes:
    if orientation is not None:
        exif = Image.Exif()
        exif[_ORIENTATION] = orientation
        options["exif"] = exif
    if file_format == "JPEG":
        options.setdefault("quality", 92)
    target = io.BytesIO()
    image.save(target, file_format, **options)
    return target.getvalue()


@pytest.fixture(scope="session", autouse=True)
def no_haste() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpucache.warmup.listing._COMPARE_SECONDS", PATIENCE)
        yield


@pytest.fixture(scope="session")
def smooth_image() -> Callable[..., Image.Image]:
    return _smooth_image


@pytest.fixture(scope="session")
def encode() -> Callable[..., bytes]:
    return _encode


@pytest.fixture(scope="session")
def write_photos() -> Callable[..., Path]:
    def write(root: Path, count: int, classes: tuple[str, ...] = ("cat", "dog", "emu"), size: Any = (150, 100)) -> Path:
        for number in range(count):
            folder = root / classes[number % len(classes)] if classes else root
            folder.mkdir(parents=True, exist_ok=True)
            orientation = 1 + number % 8 if number % 4 == 3 else None
            photo = _encode(_smooth_image(*size, seed=number), orientation=orientation)
            (folder / f"{number:04d}.jpg").write_bytes(photo)
        return root

    return write


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory, write_photos: Callable[..., Path]) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos") / "train", 150)


@pytest.fixture(scope="session")
def cache(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("caches") / "cache"
    build_cache(photos, directory, Recipe(size=16, variants=3), jobs=1)
    return directory


@pytest.fixture(scope="session")
def digests() -> Callable[[Path], Mapping[str, str]]:
    def digest(folder: Path) -> dict[str, str]:
        return {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != "times.json"
        }

    return digest


@pytest.fixture
def jitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "jitter_by_test.py").write_text(
        "import numpy as np\n"
        "def jitter(image, generator):\n"
        "    noise = generator.integers(-9, 10, image.shape)\n"
        "    return np.clip(image + noise, 0, 255).astype(np.uint8)\n"
    )
    monkeypatch.syspath_prepend(modules)
    monkeypatch.delitem(sys.modules, "jitter_by_test", raising=False)  # another test's, from another folder
    get_reusable_executor().shutdown(wait=True)  # an earlier test's workers do not know this folder
    return "jitter_by_test:jitter"


@pytest.fixture(scope="session")
def albumentations() -> Any:
    """Import albumentations the way tpucache does, so that it asks nobody for a newer version."""
    resolve("flip", 8, 8)
    return importlib.import_module("albumentations")


@pytest.fixture
def two_flips(albumentations: Any, tmp_path: Path) -> Path:
    pipeline = albumentations.Compose([albumentations.HorizontalFlip(p=0.5), albumentations.VerticalFlip(p=0.5)])
    path = tmp_path / "flips.json"
    path.write_text(json.dumps(albumentations.to_dict(pipeline)))
    return path


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    return write


@contextlib.contextmanager
def _failing_rename(pattern: str, error: BaseException, after: int = 0) -> Iterator[None]:
    real, renamed = Path.replace, []

    def replace(path: Path, target: Path) -> Path:
        if fnmatch.fnmatch(Path(target).name, pattern):
            if len(renamed) >= after:
                raise error
            renamed.append(target)
        return real(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        yield


@pytest.fixture(scope="session")
def failing_rename() -> Callable[..., contextlib.AbstractContextManager[None]]:
    return _failing_rename


@contextlib.contextmanager
def _without(*libraries: str) -> Iterator[None]:
    finders = (find_simplejpeg, find_cykooz_resizer)
    with pytest.MonkeyPatch.context() as patch:
        for name in libraries:
            patch.setitem(sys.modules, name, None)
        for find in finders:
            find.cache_clear()
        yield
    for find in finders:
        find.cache_clear()


@pytest.fixture(scope="session")
def without() -> Callable[..., contextlib.AbstractContextManager[None]]:
    return _without
