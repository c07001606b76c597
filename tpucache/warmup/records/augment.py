"""Augments a sample's arrays. The result depends only on the arrays, the seed, and the numbers of sample and variant.

`albumentations.Compose(seed=…)` gives every transform the same random stream, so that two flips at p=0.5 happen
together or not at all. Here, each (seed, sample, variant) has a generator, which the transforms of a pipeline draw from
one after the other. A custom augmentation may also use global generators, which are seeded before each call.

A callable receives the image and a generator, and returns the image. If there are annotations, it receives and returns
a dictionary of `image`, `mask`, `boxes` and `keypoints`, in the form of records.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import json
import os
import random
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.random import SeedSequence

from tpucache.errors import DependencyError, RecipeError
from tpucache.geometry import Box, clip_boxes, fill_boxes, mark_points
from tpucache.native import Array
from tpucache.plugins import load_callable
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, MASK
from tpucache.warmup.code_digest import check_imported
from tpucache.warmup.records.arrays import image_fields

Image = npt.NDArray[np.uint8]
#: A function that receives an image and its annotations by name, and a generator, and returns them augmented.
Augment = Callable[[dict[str, Array], np.random.Generator], Any]

PRESETS: Final = ("flip", "affine", "standard", "strong")
_INSTALL: Final = "`pip install albumentations==2.0.8`, or nrtk-albumentations and opencv-python-headless"
_BICUBIC: Final = 2  # cv2.INTER_CUBIC
#: Finds the classes and the callable that a definition, as JSON text, names.
_CODE: Final = re.compile(r'"(?:__class_fullname__|callable)": "([^"]*)"')
#: The classes of presets. They draw only from the generator that they receive.
_PRESET_CLASSES: Final = frozenset(
    {"Compose", "HorizontalFlip", "Affine", "RandomResizedCrop", "ColorJitter", "CoarseDropout"}
)

_BORDER_CONSTANT: Final = 0  # cv2.BORDER_CONSTANT
_NEAREST: Final = 0  # cv2.INTER_NEAREST: a resize takes the pixel under the top left corner
_NEAREST_EXACT: Final = 6  # cv2.INTER_NEAREST_EXACT: the pixel under the middle; only for resizing
_RESIZING: Final = ("crops.transforms", "geometric.resize")
_MIDDLE: Final = np.float32(0.5)

#: Libraries with global generators. They are not imported here.
_LIBRARIES: Final = frozenset({"cv2", "torch"})
_lock: Final = threading.RLock()  # a Dask worker has several threads, and they share these generators


class AugmentationError(RecipeError):
    """The augmentation fails on one sample, or does not keep shapes and dtypes."""


def augment(image: Image, definition: Mapping[str, Any], seed: int, number: int, variant: int) -> Image:
    return augment_fields({IMAGE: image}, definition, seed, number, variant)[IMAGE]


def augment_fields(
    clean: Mapping[str, Array], definition: Mapping[str, Any], seed: int, number: int, variant: int
) -> dict[str, Array]:
    """Return an augmented variant of a record's arrays, of the same dtypes and shapes. Raises AugmentationError."""
    names = image_fields(clean)
    if not names:
        return dict(clean)
    function, is_preset = build_function(json.dumps(definition, sort_keys=True), names, threading.get_ident())
    key = (number, variant)
    try:
        for _ in range(2):  # once more if the first call imported a library whose generator was not seeded
            loaded = _LIBRARIES.intersection(sys.modules)
            with contextlib.nullcontext() if is_preset else seeded_generators(SeedSequence(seed, spawn_key=(*key, 0))):
                generator = np.random.Generator(np.random.PCG64(SeedSequence(seed, spawn_key=key)))
                result = function({name: clean[name].copy() for name in names}, generator)
            if _LIBRARIES.intersection(sys.modules) == loaded:
                break
    except Exception as error:
        raise AugmentationError(
            f"the augmentation fails on sample {number}, variant {variant}: {type(error).__name__}: {error}"
        ) from error
    return {**clean, **_checked(result, {name: clean[name] for name in names})}


def _checked(result: Any, clean: Mapping[str, Array]) -> dict[str, Array]:
    if not isinstance(result, dict) or result.keys() != clean.keys():
        got = f"one of {', '.join(map(str, result))}" if isinstance(result, dict) else type(result).__name__
        raise AugmentationError(f"the augmentation must return a dictionary of {', '.join(clean)}, not {got}")
    for name, before in clean.items():
        after = result[name]
        if not isinstance(after, np.ndarray) or after.dtype != before.dtype or after.shape != before.shape:
            got = f"{after.dtype} {after.shape}" if isinstance(after, np.ndarray) else type(after).__name__
            what, advice = ("", ": end it with a resize or a crop to the size") if name == IMAGE else (f"{name} ", "")
            raise AugmentationError(
                f"the augmentation must return {what}{before.dtype} {before.shape}, not {got}{advice}"
            )
    return {name: np.ascontiguousarray(result[name]) for name in clean}


@functools.lru_cache(maxsize=256)
def build_function(definition: str, names: tuple[str, ...], thread: int) -> tuple[Augment, bool]:
    """Return the function of a definition, as JSON text, and whether it has only classes of presets.

    Each thread has its own, because a pipeline stores its generator.
    """
    content = json.loads(definition)
    if "callable" in content:
        check_imported(content)
        target = load_callable(content["callable"])
    else:
        try:
            target = _albumentations().from_dict(content)
        except DependencyError:
            raise
        except Exception as error:  # validators of transforms may raise any error
            raise RecipeError(
                f"albumentations cannot build this augmentation: {type(error).__name__}: {error}"
            ) from error
    is_preset = _PRESET_CLASSES.issuperset(_CODE.findall(definition))
    if hasattr(target, "set_random_state"):
        return _seeded(target, names), is_preset
    if names == (IMAGE,):  # the callable receives and returns the image itself
        return lambda given, generator: {IMAGE: target(given[IMAGE], generator)}, is_preset
    return target, is_preset


def _seeded(pipeline: Any, names: tuple[str, ...]) -> Augment:
    alone = names == (IMAGE,)
    pipeline = pipeline if alone else with_targets(pipeline, _albumentations())
    options = {} if alone else {"force_apply": True}  # otherwise the outer Compose would draw a number first

    def apply(given: dict[str, Array], generator: np.random.Generator) -> dict[str, Array]:
        pipeline.set_random_state(generator, random.Random(int(generator.integers(1 << 63))))
        with np.errstate(invalid="ignore", divide="ignore"):  # albumentations divides by the areas of boxes it drops
            return from_targets(pipeline(**to_targets(given), **options), given)

    return apply


def preset(name: str, height: int, width: int, has_colours: bool = True) -> dict[str, Any]:
    """Return the definition of a preset, as by `albumentations.to_dict`.

    Without `has_colours`, it leaves colours alone: albumentations expects them from 0 to 255.
    """
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
    transforms = [each for each in pipelines[name] if has_colours or each is not colour]
    definition: dict[str, Any] = A.to_dict(A.Compose(transforms))
    definition["transform"].pop("seed", None)  # only nrtk-albumentations adds this key
    return definition


@functools.cache
def _albumentations() -> Any:
    if any(importlib.metadata.distributions(name="albumentationsx")):
        raise DependencyError(
            "albumentationsx is installed in place of albumentations: it is another library under the AGPL. "
            f"`pip uninstall albumentationsx` and {_INSTALL}, or use --augment module:name"
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
        raise DependencyError(
            f"albumentations cannot be imported: {error}. {_INSTALL}, or use --augment module:name"
        ) from error
    finally:
        if hide:
            del sys.modules[bridge]
    # from_dict() would import albumentations.pytorch, and so torch, to look for transforms there.
    albumentations.core.serialization.register_additional_transforms = lambda: None
    cv2.setNumThreads(0)
    return albumentations


def with_targets(pipeline: Any, albumentations: Any) -> Any:
    """Return a Compose around a copy of a pipeline, which draws the same numbers, for boxes and keypoints too.

    For keypoints, the middle of pixel i is i; but albumentations scales them as if i were its edge, so that after an
    enlargement by 2 they are half a pixel off.
    """
    own = getattr(pipeline, "processors", {}).get("bboxes")
    limits = own.params.to_dict_private() if own else {}
    boxes = albumentations.BboxParams(**{**limits, "format": "pascal_voc", "label_fields": None})
    keypoints = albumentations.KeypointParams("xy", remove_invisible=False)
    pipeline = copy.deepcopy(pipeline)
    _fix_targets(pipeline)
    return albumentations.Compose([pipeline], bbox_params=boxes, keypoint_params=keypoints)


def to_targets(given: Mapping[str, Array]) -> dict[str, Array]:
    """Return a record's arrays by the names of albumentations, which counts from the middle of the first pixel."""
    targets = {"image": given[IMAGE]}
    if MASK in given:
        targets["mask"] = given[MASK][..., 0]
    if BOXES in given:
        targets["bboxes"] = clip_boxes(given[BOXES], _area(given[IMAGE]))
    if KEYPOINTS in given:
        targets["keypoints"] = given[KEYPOINTS][:, :2] - _MIDDLE
    return targets


def from_targets(targets: Mapping[str, Any], given: Mapping[str, Array]) -> dict[str, Array]:
    """Return the results of albumentations as a record's arrays."""
    result: dict[str, Array] = {IMAGE: targets["image"]}
    area = _area(given[IMAGE])
    if MASK in given:
        result[MASK] = targets["mask"][..., None]
    if BOXES in given:
        boxes = clip_boxes(np.asarray(targets["bboxes"]).reshape(-1, 5), area)
        result[BOXES] = fill_boxes(boxes, len(given[BOXES]))
    if KEYPOINTS in given:
        points = np.asarray(targets["keypoints"], np.float32)[:, :2] + _MIDDLE
        inside = ((points >= area[:2]) & (points <= area[2:])).all(axis=1)  # both edges count: a flip swaps them
        result[KEYPOINTS] = mark_points(points, inside & (given[KEYPOINTS][:, 2] > 0), area)
    return result


def _fix_targets(pipeline: Any) -> None:
    """Align masks with their image, and add no mirror images of boxes and keypoints at borders."""
    for transform in getattr(pipeline, "transforms", ()):
        _fix_targets(transform)
    if type(pipeline).__module__.endswith(_RESIZING) and getattr(pipeline, "mask_interpolation", None) == _NEAREST:
        pipeline.mask_interpolation = _NEAREST_EXACT
    if hasattr(pipeline, "border_mode"):
        for target in {"bboxes", "keypoints"}.intersection(pipeline._key2func):
            pipeline._key2func[target] = functools.partial(_at_plain_border, pipeline, pipeline._key2func[target])


def _at_plain_border(transform: Any, apply: Callable[..., Array], points: Array, **params: Any) -> Array:
    border = transform.border_mode
    transform.border_mode = _BORDER_CONSTANT
    try:
        return apply(points, **params)
    finally:
        transform.border_mode = border


def _area(image: Array) -> Box:
    height, width = image.shape[:2]
    return 0, 0, width, height


@contextlib.contextmanager
def seeded_generators(entropy: np.random.SeedSequence) -> Iterator[None]:
    """Seed the generators of `random`, NumPy, and of OpenCV and torch if imported, in the `with` block."""
    words = entropy.generate_state(8)
    seed = int.from_bytes(words.tobytes(), "little")
    with _lock, contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state(legacy=False))
        random.seed(seed)
        np.random.seed(words)
        if "cv2" in sys.modules:
            sys.modules["cv2"].setRNGSeed(int(words[0] >> 1))
        if "torch" in sys.modules:
            generator = sys.modules["torch"].default_generator
            stack.callback(generator.set_state, generator.get_state())
            generator.manual_seed(seed % 2**63)
        yield
