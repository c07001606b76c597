"""Augmentation as a pure function of (image, seed, sample, variant).

`albumentations.Compose(seed=…)` gives every transform the same random stream, so that two flips at p=0.5 happen
together or not at all. Here every (seed, sample, variant) has a generator of its own, handed to the whole pipeline by
`set_random_state`; its transforms draw from it one after the other.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.callables import load_callable
from tpucache.errors import DependencyError, RecipeError

Image = npt.NDArray[np.uint8]
Augment = Callable[[Image, np.random.Generator], Image]

PRESETS: Final = ("flip", "affine", "standard", "strong")
_BICUBIC: Final = 2  # cv2.INTER_CUBIC


def resolve(name: str, height: int, width: int) -> dict[str, Any]:
    """Return what an `--augment` value means, in full, as JSON values: what the manifest and the fingerprint hold.

    `name` is a preset, a YAML or JSON file of `albumentations.to_dict`, or `module:name` of a callable. Raises
    RecipeError when it means nothing or does not make (height, width, 3) of (height, width, 3).
    """
    if name in PRESETS:
        definition: dict[str, Any] = _plain(_albumentations().to_dict(_preset(name, height, width)))
    elif name.endswith((".json", ".yaml", ".yml")):
        definition = _read_file(Path(name))
    elif ":" in name:
        definition = {"callable": name, "source_sha256": _source_sha256(name)}
    else:
        raise RecipeError(
            f"there is no augmentation {name!r}: use one of {', '.join(PRESETS)}, a .yaml or .json file of "
            "albumentations.to_dict, or module:name of a callable"
        )
    augment(np.zeros((height, width, 3), np.uint8), definition, 0, 0, 1)
    return definition


def augment(image: Image, definition: Mapping[str, Any], seed: int, number: int, variant: int) -> Image:
    """Return one augmented variant of an image: the same for the same arguments, in any process and any order.

    Raises RecipeError when the augmentation fails or changes the image's shape or dtype.
    """
    function = _build(json.dumps(definition, sort_keys=True))
    entropy = np.random.SeedSequence(seed, spawn_key=(number, variant))
    try:
        result = function(image.copy(), np.random.Generator(np.random.PCG64(entropy)))
    except Exception as error:
        raise RecipeError(
            f"the augmentation fails on sample {number}, variant {variant}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(result, np.ndarray) or result.dtype != np.uint8 or result.shape != image.shape:
        got = f"{result.dtype} {result.shape}" if isinstance(result, np.ndarray) else type(result).__name__
        raise RecipeError(
            f"the augmentation must return uint8 {image.shape}, not {got}: end it with a resize or a crop to the size"
        )
    return np.ascontiguousarray(result)


@functools.lru_cache(maxsize=8)
def _build(definition: str) -> Augment:
    content = json.loads(definition)
    if "callable" in content:
        target = load_callable(content["callable"])
        return _seeded(target) if hasattr(target, "set_random_state") else target
    try:
        return _seeded(_albumentations().from_dict(content))
    except DependencyError:
        raise
    except Exception as error:  # from_dict raises whatever its transforms' validators raise
        raise RecipeError(f"albumentations cannot build this augmentation: {type(error).__name__}: {error}") from error


def _seeded(pipeline: Any) -> Augment:
    """Return an albumentations pipeline as a function of (image, generator)."""

    def apply(image: Image, generator: np.random.Generator) -> Image:
        pipeline.set_random_state(generator, random.Random(int(generator.integers(1 << 63))))
        result: Image = pipeline(image=image)["image"]
        return result

    return apply


def _preset(name: str, height: int, width: int) -> Any:
    A = _albumentations()
    flip = A.HorizontalFlip(p=0.5)
    affine = A.Affine(
        scale=(0.9, 1.1),
        translate_percent=(-0.06, 0.06),
        rotate=(-10, 10),
        interpolation=_BICUBIC,
        border_mode=4,  # cv2.BORDER_REFLECT_101: no invented black corners
        p=0.9,
    )
    crop = A.RandomResizedCrop((height, width), scale=(0.5, 1.0), ratio=(0.8, 1.25), interpolation=_BICUBIC)
    colour = A.ColorJitter(brightness=(0.8, 1.2), contrast=(0.8, 1.2), saturation=(0.8, 1.2), hue=(-0.03, 0.03), p=0.8)
    erase = A.CoarseDropout(num_holes_range=(1, 2), hole_height_range=(0.1, 0.3), hole_width_range=(0.1, 0.3), p=0.5)
    pipelines = {
        "flip": [flip],
        "affine": [affine],
        "standard": [flip, crop, colour],
        "strong": [flip, crop, affine, colour, erase],
    }
    return A.Compose(pipelines[name])


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"the augmentation file {path} cannot be read: {error}") from error
    try:
        if path.suffix == ".json":
            content = json.loads(text)
        else:
            import yaml

            content = yaml.safe_load(text)
        content = _plain(content)
    except Exception as error:  # yaml's errors share no base with json's
        raise RecipeError(f"{path} is no {path.suffix[1:]}: {error}") from error
    if not isinstance(content, dict) or "transform" not in content:
        raise RecipeError(f"{path} holds no augmentation: write albumentations.to_dict(pipeline) into it")
    return content


def _plain(content: Any) -> Any:
    """Return what JSON makes of it, tuples as lists: a definition has to equal the one read back from a manifest."""
    return json.loads(json.dumps(content))


def _source_sha256(name: str) -> str:
    """Hash the file that defines a callable, so that a changed augmentation is noticed."""
    load_callable(name)
    try:
        spec = importlib.util.find_spec(name.partition(":")[0])
    except ValueError:  # __main__ has none
        return ""
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


@functools.cache
def _albumentations() -> Any:
    """Import albumentations 2.0.8 without its request to PyPI, without torch, and with OpenCV on one thread."""
    try:
        importlib.metadata.distribution("albumentationsx")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        raise DependencyError(
            "albumentationsx is installed in place of albumentations: it is another library under the AGPL. "
            "`pip uninstall albumentationsx` and `pip install albumentations==2.0.8`, or use module:name"
        )
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    bridge = "albumentations.pytorch"  # importing albumentations imports torch where it is installed
    hide = bridge not in sys.modules
    if hide:
        sys.modules[bridge] = types.ModuleType(bridge)
    try:
        import albumentations
        import cv2
    except ImportError as error:
        raise DependencyError(f"albumentations cannot be imported: {error}") from error
    finally:
        if hide:
            del sys.modules[bridge]
    # from_dict() would import albumentations.pytorch, and with it torch, to look for transforms there.
    albumentations.core.serialization.register_additional_transforms = lambda: None
    cv2.setNumThreads(0)
    return albumentations
