"""Reading .npy files that somebody else wrote: a header is checked before anything in it is used."""

from __future__ import annotations

import io
import math
import tokenize
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import FormatError

# What numpy's header parser raises for bytes that are not a header; it reads a Python literal.
_BROKEN: Final = (
    ValueError,
    TypeError,
    EOFError,
    SyntaxError,
    OverflowError,
    RecursionError,
    MemoryError,
    tokenize.TokenError,
)


class Header(NamedTuple):
    """An array's dtype and shape, and the byte of the file where its data start."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


def read_header(file: BinaryIO) -> Header:
    """Read the header of a version 1.0 .npy file in C order. Raises FormatError."""
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise FormatError("the array is not of .npy version 1.0")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except _BROKEN as error:
        raise FormatError(f"not a .npy header: {error}") from error
    if fortran and len(shape) > 1:
        raise FormatError("the array is in Fortran order")
    if dtype.hasobject or any(side < 0 for side in shape):
        raise FormatError(f"no array of numbers has dtype {dtype} and shape {shape}")
    return Header(dtype, shape, file.tell())


def parse(data: bytes) -> npt.NDArray[Any]:
    """Return the array in a .npy file's bytes, read-only. Raises FormatError."""
    header = read_header(io.BytesIO(data))
    if math.prod(header.shape) * header.dtype.itemsize != len(data) - header.offset:
        raise FormatError(f"{len(data) - header.offset} bytes are no {header.dtype} {header.shape}")
    return np.frombuffer(data, header.dtype, offset=header.offset).reshape(header.shape)
