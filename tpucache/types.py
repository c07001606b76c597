"""The type of NumPy arrays in signatures."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

#: A NumPy array; docstrings give its dtype and shape.
Array = npt.NDArray[Any]
