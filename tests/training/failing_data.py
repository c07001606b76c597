"""Generated data with more fields than the image, named as `failing_data:name`."""

from __future__ import annotations

from typing import Any

import numpy as np
from tiny_tasks import Generated


def labelled_squares() -> Generated:
    """A bright rectangle somewhere, with its mask, and one of two classes."""

    def make(rng: np.random.Generator, number: int) -> dict[str, Any]:
        mask = np.zeros((16, 16), np.uint8)
        top, left = rng.integers(0, 8, 2)
        mask[top : top + 8, left : left + 7] = 1
        return {"image": (40 + 170 * mask[..., None]).repeat(3, 2), "mask": mask, "label": number % 2}

    return Generated(make, "even", "odd")


def boxed() -> Generated:
    """Noise with a box, and one of four classes."""

    def make(rng: np.random.Generator, number: int) -> dict[str, Any]:
        image = rng.integers(0, 256, (16, 16, 3), np.uint8)
        return {"image": image, "boxes": np.array([[1, 2, 5, 9, 0]], np.float32), "label": number % 4}

    return Generated(make, "a", "b", "c", "d")


def boxes() -> Generated:
    """Black images with a box of one of two classes, and no class themselves."""

    def make(_rng: np.random.Generator, number: int) -> dict[str, Any]:
        return {"image": np.zeros((8, 8, 3), np.uint8), "boxes": np.array([[1, 1, 5, 5, number % 2]], np.float32)}

    return Generated(make, "first", "second")


def keypoints() -> Generated:
    """Black images with a point."""

    def make(_rng: np.random.Generator, _number: int) -> dict[str, Any]:
        return {"image": np.zeros((8, 8, 3), np.uint8), "keypoints": np.array([[1, 1]], np.float32)}

    return Generated(make)


def void_squares() -> Generated:
    """A bright rectangle of class 1 with an edge that has no class."""

    def make(rng: np.random.Generator, _number: int) -> dict[str, Any]:
        mask = np.zeros((64, 64), np.uint8)
        top, left = rng.integers(0, 32, 2)
        mask[top : top + 30, left : left + 30] = 255
        mask[top + 2 : top + 28, left + 2 : left + 28] = 1
        image = rng.normal(70 + 110 * (mask[..., None] > 0), 25, (64, 64, 3)).clip(0, 255).astype(np.uint8)
        return {"image": image, "mask": mask}

    return Generated(make)
