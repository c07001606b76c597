"""HEIC and HEIF files, which Pillow reads once pillow-heif is registered with it."""

from __future__ import annotations

import functools
from typing import Final

from tpucache.errors import SampleError

_BRANDS: Final = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


def is_heif(data: bytes) -> bool:
    """Return whether bytes begin as a HEIF file whose images are HEVC does; AVIF, which Pillow reads, is none."""
    return data[4:8] == b"ftyp" and data[8:12] in _BRANDS and b"avif" not in data[8:48]


def register_heif(path: str, what: str = "") -> None:
    """Have Pillow read HEIF files. Raises SampleError, naming the library, where it is not installed."""
    try:
        _register()
    except ImportError as error:
        raise SampleError(path, f"{what}is a HEIC file: `pip install pillow-heif` to read it ({error})") from error


@functools.cache
def _register() -> None:
    import pillow_heif

    pillow_heif.register_heif_opener()
