"""How many boxes, keypoints and masks there are: in a source's image, and in what a record shows of it.

In a record, a box counts where it has an area, a keypoint where it is visible, and a mask where it masks anything. In
the source, all boxes count, and keypoints inside the image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy.typing as npt

from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, MASK

Array = npt.NDArray[Any]

#: Annotations by the name of their field.
Counts = dict[str, int]

_COUNTERS: Final[Mapping[str, Callable[[Array], Any]]] = {
    MASK: lambda mask: mask.any(),
    BOXES: lambda boxes: ((boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])).sum(),
    KEYPOINTS: lambda points: (points[:, 2] > 0).sum(),
}


def count_annotations(arrays: Mapping[str, Array]) -> Counts:
    """Return how many annotations the arrays of a record have; none are counted where there is no image."""
    names = [name for name in _COUNTERS if name in arrays] if IMAGE in arrays else []
    return {name: int(_COUNTERS[name](arrays[name])) for name in names}
