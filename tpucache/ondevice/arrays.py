"""Array functions under names that torch and JAX share, so that the device's work is written once.

Callers use only names and positional arguments that `torch` and `jax.numpy` have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Array = Any  # a torch.Tensor, or a jax.Array


class ArrayLibrary(NamedTuple):
    """The array functions of torch, JAX or numpy, and a function that moves constants to the device.

    `functions` is the module `torch`, `jax.numpy` or `numpy`. `constant` takes a float32 numpy array and returns it as
    an array on the device. In the context `exact`, no number is rounded to fewer bits.
    """

    functions: Any
    constant: Callable[[npt.NDArray[np.float32]], Array]
    exact: Callable[[], AbstractContextManager[object]] = nullcontext

    def cast(self, array: Array, dtype: str) -> Array:
        """Return `array` converted to `dtype`, a dtype's name such as "float32"."""
        target = getattr(self.functions, dtype)
        converted: Array = array.to(target) if hasattr(array, "to") else array.astype(target)
        return converted

    def float(self, array: Array) -> Array:
        return self.cast(array, "float32")

    def turned(self, images: Array, draws: Array, transposed: int, rows: int, columns: int) -> Array:
        """Return images (batch, channels, height, width) transposed, and then with rows and columns reversed.

        `transposed`, `rows` and `columns` are the columns of the random numbers that say for which images; -1 for none.
        """
        functions = self.functions
        if transposed >= 0:
            images = functions.where(flag(draws, transposed), images.swapaxes(2, 3), images)
        for column, axis in (rows, 2), (columns, 3):
            if column >= 0:
                images = functions.where(flag(draws, column), functions.flip(images, (axis,)), images)
        return images


#: The weights of red, green and blue in luma: ITU-R BT.601.
LUMA: Final = np.array((0.299, 0.587, 0.114), np.float32).reshape(1, 3, 1, 1)


def number(draws: Array, column: int) -> Array:
    """Return a column of the random numbers `draws` as (batch, 1, 1, 1)."""
    return draws[:, column].reshape(-1, 1, 1, 1)


def flag(draws: Array, column: int) -> Array:
    """Return whether a column of the random numbers `draws` is above 1/2, as bool (batch, 1, 1, 1)."""
    return number(draws, column) > 0.5
