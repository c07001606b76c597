"""A record's arrays <-> what albumentations calls its targets.

albumentations moves masks by the nearest pixel; boxes in coordinates where pixel i covers [i, i + 1), as records have
them; keypoints in coordinates where the middle of pixel i is i (but scales them as if that were i's edge, so that a
crop made twice as large puts them half a pixel off).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, MASK
from tpucache.warmup.records.arrays import clip_boxes, fill_boxes, mark_points

Array = npt.NDArray[Any]

_BORDER_CONSTANT: Final = 0  # cv2.BORDER_CONSTANT
_NEAREST: Final = 0  # cv2.INTER_NEAREST: the pixel under the left top corner, when resizing
_NEAREST_EXACT: Final = 6  # cv2.INTER_NEAREST_EXACT: the pixel under the middle; cv2 knows it for resizing only
_RESIZING: Final = ("crops.transforms", "geometric.resize")
_MIDDLE: Final = np.float32(0.5)


def with_targets(pipeline: Any, albumentations: Any) -> Any:
    """Return an albumentations pipeline that takes a record's boxes and keypoints, too; the given one is not changed.

    It is a Compose around a copy, not in place of it, so that its own settings and its draws are the same.
    Its own parameters of boxes other than their format, such as `min_visibility`, are kept.
    """
    own = getattr(pipeline, "processors", {}).get("bboxes")
    limits = own.params.to_dict_private() if own else {}
    boxes = albumentations.BboxParams(**{**limits, "format": "pascal_voc", "label_fields": None})
    keypoints = albumentations.KeypointParams("xy", remove_invisible=False)
    pipeline = copy.deepcopy(pipeline)
    _fix_targets(pipeline)
    return albumentations.Compose([pipeline], bbox_params=boxes, keypoint_params=keypoints)


def to_targets(given: Mapping[str, Array]) -> dict[str, Array]:
    """Return a record's arrays as albumentations takes them: boxes without padding, and every box inside the image."""
    targets = {"image": given[IMAGE]}
    if MASK in given:
        targets["mask"] = given[MASK][..., 0]
    if BOXES in given:
        targets["bboxes"] = clip_boxes(given[BOXES], _area(given[IMAGE]))
    if KEYPOINTS in given:
        targets["keypoints"] = given[KEYPOINTS][:, :2] - _MIDDLE
    return targets


def from_targets(targets: Mapping[str, Any], given: Mapping[str, Array]) -> dict[str, Array]:
    """Return what albumentations made of the record's arrays `given`, as a record has them.

    Raises ValueError when there are more boxes than the record has room for, or another number of keypoints.
    """
    result: dict[str, Array] = {IMAGE: targets["image"]}
    if MASK in given:
        result[MASK] = targets["mask"][..., None]
    if BOXES in given:
        boxes = clip_boxes(np.asarray(targets["bboxes"]).reshape(-1, 5), _area(given[IMAGE]))
        result[BOXES] = fill_boxes(boxes, len(given[BOXES]))
    if KEYPOINTS in given:
        points = np.asarray(targets["keypoints"], np.float32)[:, :2] + _MIDDLE
        area = _area(given[IMAGE])
        inside = ((points >= area[:2]) & (points <= area[2:])).all(axis=1)  # both edges: a flip takes one to the other
        result[KEYPOINTS] = mark_points(points, inside & (given[KEYPOINTS][:, 2] > 0), area)
    return result


def _fix_targets(pipeline: Any) -> None:
    """Keep boxes and keypoints single, where albumentations would add mirror images, and masks under their image."""
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


def _area(image: Array) -> tuple[float, float, float, float]:
    return 0.0, 0.0, float(image.shape[1]), float(image.shape[0])
