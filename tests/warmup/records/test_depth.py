"""Depth: an image of more than 8 bits is converted where it is certain what is white, and refused where it is not."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hostile_bytes import chunk
from made import encode
from numpy.testing import assert_allclose, assert_array_equal

from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.warmup.records.presize import presize

Array = npt.NDArray[Any]

_GREY, _RGB, _GREY_ALPHA, _RGBA = 0, 2, 4, 6
_CHANNELS = {_GREY: 1, _RGB: 3, _GREY_ALPHA: 2, _RGBA: 4}


def _png(values: Array, colour: int = _GREY, extra: bytes = b"") -> bytes:
    height, width = values.shape
    channels = np.repeat(values[..., None], _CHANNELS[colour], axis=2).astype(">u2")
    if colour in (_GREY_ALPHA, _RGBA):
        channels[..., -1] = 65535
    rows = b"".join(b"\0" + row.tobytes() for row in channels)
    header = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    parts = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def _tiff(values: Array, photometric: int = 1) -> bytes:
    height, width = values.shape[:2]
    bits, kind = 8 * values.dtype.itemsize, {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    content = values.tobytes()
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, photometric), (273, 8), (277, 1), (278, height)]
    tags += [(279, len(content)), (339, kind)]
    short = {258, 259, 262, 277, 339}
    directory = b"".join(
        struct.pack("<HHI", tag, 3 if tag in short else 4, 1) + struct.pack("<I", value) for tag, value in tags
    )
    directory = struct.pack("<H", len(tags)) + directory + bytes(4)
    return struct.pack("<2sHI", b"II", 42, 8 + len(content)) + content + directory


def _ramp(most: float, dtype: Any = np.uint16) -> Array:
    return np.linspace(0, most, 16 * 16).reshape(16, 16).astype(dtype)


def _grey(data: bytes | Array, white: int | None = None) -> Array:
    pixels = presize(data, Recipe(size=16, white_level=white), "some/path").astype(int)
    assert_array_equal(pixels, np.repeat(pixels[..., :1], 3, axis=2))
    return pixels[..., 0]


def _expected(values: Array, white: float) -> Array:
    return np.rint(values.astype(np.float64) * 255 / white)


@pytest.mark.parametrize("most", [16384, 40000, 65535])
def test_grey_that_uses_16_bits_is_scaled_from_16_bits(most: int) -> None:
    values = _ramp(most)
    for data in (_png(values), _tiff(values), _tiff(values.astype(np.int32)), _tiff(values.astype(np.uint32))):
        assert_allclose(_grey(data), _expected(values, 65535), atol=0.51)


@pytest.mark.parametrize("most", [1, 255, 1023, 4095, 16383])
@pytest.mark.parametrize(
    "make",
    [
        _png,
        lambda values: _png(values, _RGB),
        lambda values: _png(values, _GREY_ALPHA),
        lambda values: _png(values, _RGBA),
        _tiff,
        lambda values: _tiff(values.astype(np.int32)),
        lambda values: _tiff(values.astype(np.int16)),
    ],
    ids=["grey png", "rgb png", "grey and alpha png", "rgba png", "tiff", "int32 tiff", "int16 tiff"],
)
def test_fewer_bits_in_16_do_not_turn_black(make: Any, most: int) -> None:
    with pytest.raises(SampleError, match="nearly black") as caught:
        _grey(make(_ramp(most)))
    assert caught.value.path == "some/path"
    assert "--white-level" in caught.value.reason


@pytest.mark.parametrize(
    "values",
    [
        _ramp(65536, np.int32),
        _ramp(1 << 20, np.int32),
        np.full((16, 16), -3, np.int32),
        np.full((16, 16), 3_000_000_000, np.uint32),
        _ramp(255, np.float32),
        _ramp(1.01, np.float32),
        np.full((16, 16), -3, np.float32),
        _ramp(-0.5, np.float32) + 0.25,
        _ramp(0.05, np.float32),
        np.full((16, 16), np.nan, np.float32),
        np.full((16, 16), np.inf, np.float32),
    ],
    ids=lambda values: f"{values.dtype} {values.min():.5g} to {values.max():.5g}",
)
def test_numbers_of_another_range_do_not_turn_black_or_white(values: Array) -> None:
    with pytest.raises(SampleError, match="its pixels are"):
        _grey(_tiff(values))


@pytest.mark.parametrize("most", [0.1, 0.5, 1])
def test_floats_are_scaled_from_0_to_1(most: float) -> None:
    values = _ramp(most, np.float32)
    assert_allclose(_grey(_tiff(values)), _expected(values, 1), atol=0.51)


@pytest.mark.parametrize(
    ("values", "white"),
    [
        (_ramp(4095), 4095),
        (_ramp(300), 4095),
        (_ramp(1000), 65535),
        (_ramp(1 << 20, np.int32), 1 << 20),
        (_ramp(255, np.float32), 255),
        (_ramp(0.01, np.float32), 1),
    ],
    ids=str,
)
def test_a_stated_white_level_scales(values: Array, white: int) -> None:
    for data in (_tiff(values), *([_png(values)] if values.dtype == np.uint16 else [])):
        assert_allclose(_grey(data, white), _expected(values, white), atol=0.51)


def test_numbers_above_a_stated_white_level_are_refused() -> None:
    with pytest.raises(SampleError, match="0 to 4096, not within 0 to 4095"):
        _grey(_png(_ramp(4096)), 4095)


def test_a_white_level_leaves_8_bits_alone() -> None:
    values = _ramp(100, np.uint8)
    assert_array_equal(_grey(encode(values), 4095), values)


@pytest.mark.parametrize("colour", [_RGB, _GREY_ALPHA, _RGBA])
def test_colours_of_16_bits_are_their_high_bytes(colour: int) -> None:
    values = _ramp(65535)
    assert_array_equal(_grey(_png(values, colour)), values >> 8)
    dark = _ramp(2000)
    assert_array_equal(_grey(_png(dark, colour), 65535), dark >> 8)
    with pytest.raises(SampleError, match="can scale only grey"):
        _grey(_png(values, colour), 4095)


@pytest.mark.parametrize("colour", [_GREY, _RGB, _RGBA])
def test_black_is_black_whatever_is_white(colour: int) -> None:
    assert not _grey(_png(np.zeros((16, 16)), colour)).any()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_tiff_whose_zero_is_white_is_inverted_at_every_depth(dtype: Any) -> None:
    values = _ramp(np.iinfo(dtype).max, dtype)
    assert_allclose(_grey(_tiff(values, 0)), 255 - _expected(values, np.iinfo(dtype).max), atol=0.51)


def test_a_transparent_grey_of_16_bits_is_white() -> None:
    values = np.full((16, 16), 30000)
    values[:, 8:] = 20000
    grey = _grey(_png(values, extra=chunk(b"tRNS", struct.pack(">H", 30000))))
    assert (grey[:, :4] == 255).all()
    assert (grey[:, 12:] == 78).all()


def test_a_pgm_states_itself_what_is_white() -> None:
    values = _ramp(1000)
    data = b"P5 16 16 4095\n" + values.astype(">u2").tobytes()
    for white in (None, 300):
        assert_allclose(_grey(data, white), _expected(values, 4095), atol=0.51)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_transparent_grey_of_few_bits_is_white(bits: int) -> None:
    rows = bytes([0, *(0b00011011 for _ in range(2 * bits))]) * 16
    header = struct.pack(">IIBBBBB", 16, 16, bits, _GREY, 0, 0, 0)
    parts = [(b"IHDR", header), (b"tRNS", struct.pack(">H", 1)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    digits = np.unpackbits(np.frombuffer(rows[1 : 1 + 2 * bits], np.uint8)).reshape(16, bits)
    numbers = digits @ (1 << np.arange(bits)[::-1])
    grey = np.where(numbers == 1, 255, numbers * 255 // (2**bits - 1))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
    assert_array_equal(_grey(data), np.tile(grey, (16, 1)))


def test_a_transparent_colour_of_16_bits_is_refused() -> None:
    data = _png(_ramp(65535), _RGB, chunk(b"tRNS", struct.pack(">HHH", 1000, 1000, 1000)))
    with pytest.raises(SampleError, match="is transparent"):
        _grey(data)


@pytest.mark.parametrize("most", [16384, 32767])
def test_signed_numbers_of_16_bits_need_a_white_level(most: int) -> None:
    values = _ramp(most, np.int16)
    for data in (_tiff(values), values):
        with pytest.raises(SampleError, match=r"are signed and have 16 bits, .* such as --white-level"):
            _grey(data)
        assert_allclose(_grey(data, most), _expected(values, most), atol=0.51)
    assert not _grey(_tiff(np.zeros((16, 16), np.int16))).any()
