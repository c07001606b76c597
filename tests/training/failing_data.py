"""Generated data with fields beside the image, named as `failing_data:name`."""

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
