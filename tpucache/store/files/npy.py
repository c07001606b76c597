"""Reading .npy files that somebody else wrote: a header is checked before anything in it is used."""

from __future__ import annotations

import io
import math
import re
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import FormatError
from tpucache.store.format import INDEX_DTYPE

_MAGIC: Final = b"\x93NUMPY\x01\x00"
#: A header as numpy writes it. It is a Python literal, but nothing of it is evaluated.
_HEADER: Final = re.compile(
    r"\{'descr': (?P<descr>'[^'\\]{2,8}'|\[[^]]{0,1000}\]), 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>(?:\d{1,18}, ?)*(?:\d{1,18})?)\), \} *\n"
)
_NUMBERS: Final = re.compile(r"'(\|b1|[|<>=][iuf]1|[<>=][iuf][248])'")
_MAX_DIMENSIONS: Final = 32


class Header(NamedTuple):
    """An array's dtype and shape, and the byte of the file where its data start."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


def read_header(file: BinaryIO) -> Header:
    """Read the header of a version 1.0 .npy file of numbers, or of index rows, in C order. Raises FormatError."""
    start = file.read(len(_MAGIC) + 2)
    length = int.from_bytes(start[len(_MAGIC) :], "little")
    text = file.read(length).decode("latin-1")
    found = _HEADER.fullmatch(text)
    if not start.startswith(_MAGIC) or len(text) != length or found is None:
        raise FormatError("it has no header of a .npy file of version 1.0")
    shape = tuple(int(side) for side in re.findall(r"\d+", found["shape"]))
    if len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"an array of {len(shape)} dimensions is none")
    if found["fortran"] == "True" and len(shape) > 1:
        raise FormatError("the array is in Fortran order")
    return Header(_dtype_of(found["descr"]), shape, len(start) + length)


def parse(data: bytes) -> npt.NDArray[Any]:
    """Return the array in a .npy file's bytes, read-only. Raises FormatError."""
    header = read_header(io.BytesIO(data))
    if math.prod(header.shape) * header.dtype.itemsize != len(data) - header.offset:
        raise FormatError(f"{len(data) - header.offset} bytes are no {header.dtype} {header.shape}")
    try:
        return np.frombuffer(data, header.dtype, offset=header.offset).reshape(header.shape)
    except (ValueError, OverflowError) as error:  # of an array without items, whose sides numpy cannot hold
        raise FormatError(f"no array has shape {header.shape}") from error


def _dtype_of(text: str) -> np.dtype[Any]:
    """Return the dtype that a header names. Raises FormatError for any but plain numbers and index rows."""
    if text == repr(INDEX_DTYPE.descr):
        return INDEX_DTYPE
    found = _NUMBERS.fullmatch(text)
    if found is None or "f1" in text:
        raise FormatError(f"it does not hold plain numbers, but {text:.100}")
    return np.dtype(found[1])
