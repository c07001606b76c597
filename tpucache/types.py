"""The type of arrays in signatures."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

#: An array of numpy whose dtype and shape the docstring says.
Array = npt.NDArray[Any]
