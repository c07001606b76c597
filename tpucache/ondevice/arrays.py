"""Array functions under names that torch and JAX share, so that the device's work is written once.

Callers use only names and positional arguments that `torch` and `jax.numpy` have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = Any  # a torch.Tensor, or a jax.Array


class ArrayLibrary(NamedTuple):
    """The array functions of torch, JAX or numpy, and a function that moves constants to the device.

    `functions` is the module `torch`, `jax.numpy` or `numpy`. `constant` takes a float32 numpy array and returns it as
    an array on the device.
    """

    functions: Any
    constant: Callable[[npt.NDArray[np.float32]], Array]

    def cast(self, array: Array, dtype: str) -> Array:
        """Return `array` converted to `dtype`, a dtype's name such as "float32"."""
        target = getattr(self.functions, dtype)
        converted: Array = array.to(target) if hasattr(array, "to") else array.astype(target)
        return converted
