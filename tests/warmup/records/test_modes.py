"""Files whose channels and numbers are kept come out as they were written."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from hostile_bytes import chunk
from made import encode
from numpy.testing import assert_array_equal
from PIL import Image

from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.warmup.records.masks import decode_mask
from tpucache.warmup.records.presize import presize

KEEP = Recipe(size=(9, 7), mode="keep")
RNG = np.random.default_rng(0)
DEEP = RNG.integers(0, 65536, (9, 7, 3)).astype(np.uint16)


def kept(image: Image.Image, file_format: str = "PNG", **options: Any) -> npt.NDArray[Any]:
    return presize(encode(image, file_format, **options), KEEP, "a")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGB", "RGBA", "CMYK", "I;16", "F"])
def test_channels_and_numbers_are_those_of_the_file(mode: str) -> None:
    numbers = RNG.integers(0, 256, (9, 7, 4), np.uint8)
    arrays: dict[str, npt.NDArray[Any]] = {
        "1": numbers[..., 0] > 99,
        "I;16": DEEP[..., 0],
        "F": RNG.normal(0, 9, (9, 7)).astype(np.float32),
    }
    width = {"L": 1, "LA": 2, "RGB": 3}.get(mode, 4)
    pixels = arrays.get(mode, numbers[..., 0] if width == 1 else numbers[..., :width])
    image = Image.frombytes("CMYK", (7, 9), pixels.tobytes()) if mode == "CMYK" else Image.fromarray(pixels)
    found = kept(image, "TIFF" if mode in ("F", "CMYK") else "PNG")
    expected = pixels.astype(np.uint8) * np.uint8(255) if mode == "1" else pixels
    assert found.dtype == expected.dtype
    assert_array_equal(found, expected.reshape(9, 7, -1))


def test_a_palette_is_its_colours_and_its_transparency_a_channel() -> None:
    image = Image.fromarray(RNG.integers(0, 2, (9, 7), np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 200, 100, 0])
    assert_array_equal(kept(image), np.asarray(image.convert("RGB")))
    assert kept(image, transparency=0).shape == (9, 7, 4)


@pytest.mark.parametrize("suffix", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [3, 4])
def test_colours_of_16_bits_are_kept_bit_for_bit(channels: int, suffix: str) -> None:
    pixels = RNG.integers(0, 65536, (9, 7, channels)).astype(np.uint16)
    order = [2, 1, 0, 3][:channels]
    done, data = cv2.imencode(suffix, pixels[..., order])
    assert done
    assert_array_equal(presize(data.tobytes(), KEEP, "a"), pixels)


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.float32])
def test_grey_tiffs_are_kept_in_their_depth(dtype: Any) -> None:
    limits = (-9999, 9999) if dtype == np.int16 else (0, 60000)
    pixels = RNG.integers(*limits, (9, 7)).astype(dtype)
    done, data = cv2.imencode(".tiff", pixels)
    assert done
    found = presize(data.tobytes(), KEEP, "a")
    assert found.dtype == dtype
    assert_array_equal(found[..., 0], pixels)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (Image.fromarray(RNG.integers(0, 9, (9, 7)).astype(np.int32)), "whole numbers of 32 bits: save them as 16"),
        (Image.fromarray(np.full((9, 7), np.inf, np.float32)), "not finite"),
    ],
)
def test_what_cannot_be_kept_is_refused(image: Image.Image, reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        kept(image, "TIFF")


def test_a_png_of_16_bits_cut_anywhere_is_refused() -> None:
    data = cv2.imencode(".png", DEEP)[1].tobytes()
    for cut in range(8, len(data) - 12, 29):
        with pytest.raises(SampleError):
            presize(data[:cut], KEEP, "a")


def tiff(pixels: npt.NDArray[Any], tags: dict[int, list[int]]) -> bytes:
    content, planes = pixels.tobytes(), tags[277][0] if tags.get(284) == [2] else 1
    part = len(content) // planes
    longs = {273: [8 + part * plane for plane in range(planes)], 279: [part] * planes}
    rows = sorted({256: [7], 257: [9], 259: [1], 278: [9], **longs, **tags}.items())
    directory, extra = struct.pack("<H", len(rows)), b""
    end = 8 + len(content) + 2 + 12 * len(rows) + 4
    for tag, values in rows:
        kind = "I" if tag in longs else "H"
        value = struct.pack(f"<{len(values)}{kind}", *values)
        if len(value) > 4:
            value, extra = struct.pack("<I", end + len(extra)), extra + value
        directory += struct.pack("<HHI", tag, 4 if kind == "I" else 3, len(values)) + value.ljust(4, b"\0")
    return struct.pack("<2sHI", b"II", 42, 8 + len(content)) + content + directory + bytes(4) + extra


@pytest.mark.parametrize(
    ("dtype", "count", "tags"),
    [("u1", 4, {}), ("u2", 4, {}), ("u1", 6, {}), ("u1", 2, {262: [1]}), ("u1", 5, {262: [5]})],
)
def test_channels_that_pillow_leaves_out_are_refused(dtype: str, count: int, tags: dict[int, list[int]]) -> None:
    colours = {1: 1, 2: 3, 5: 4}[tags.get(262, [2])[0]]
    pixels = RNG.integers(0, 256, (9, 7, count)).astype(dtype) * np.array(257 if dtype == "u2" else 1, dtype)
    more = {258: [8 * pixels.itemsize] * count, 262: [2], 277: [count], 338: [0] * (count - colours)}
    data = tiff(pixels, {**more, **tags})
    for recipe in (KEEP, Recipe(size=(9, 7)), Recipe(size=(9, 7), mode="grey")):
        with pytest.raises(SampleError, match=f"Pillow reads {colours} of its {count} channels"):
            presize(data, recipe, "a")


@pytest.mark.parametrize("mode", ["rgb", "grey", "keep"])
def test_files_that_pillow_misreads_are_refused(mode: Any) -> None:
    recipe = Recipe(size=(9, 7), mode=mode)
    signed = tiff(np.full((9, 7), -3, np.int8), {258: [8], 262: [1], 277: [1], 339: [2]})
    with pytest.raises(SampleError, match="signed numbers of 8 bits as unsigned"):
        presize(signed, recipe, "a")
    planes = tiff(DEEP.transpose(2, 0, 1), {258: [16] * 3, 262: [2], 277: [3], 284: [2]})
    with pytest.raises(SampleError, match="16 bits that are stored plane by plane"):
        presize(planes, recipe, "a")
    for white in (15, 255):  # 16 greys in steps of 1, which Pillow takes for 8 bits, or in steps of 17
        bmp = bmp_of_greys(np.arange(63, dtype=np.uint8).reshape(9, 7) % 16, white // 15)
        for data in (bmp, bmp[14:]):  # a DIB has no header of the file
            if white == 15:
                with pytest.raises(SampleError, match="a BMP of 4 bits with a palette of greys"):
                    presize(data, recipe, "a")
            else:
                assert (presize(data, recipe, "a")[..., 0] == np.arange(63).reshape(9, 7) % 16 * 17).all()
    done, data = cv2.imencode(".jp2", RNG.integers(0, 65536, (64, 64, 3)).astype(np.uint16))
    assert done
    with pytest.raises(SampleError, match="no marker SIZ, which states its bits: the file is damaged"):
        presize(data.tobytes().replace(b"\xff\x4f\xff\x51", b"\xff\x4f\xff\x50"), recipe, "a")
    with pytest.raises(SampleError, match="JPEG 2000 with colours of more than 8 bits"):
        presize(data.tobytes(), recipe, "a")


def grey_png(numbers: npt.NDArray[np.uint8], bits: int) -> bytes:
    height, width = numbers.shape
    rows = np.unpackbits(numbers[..., None], axis=2)[..., 8 - bits :].reshape(height, width * bits)
    lines = b"".join(b"\0" + line.tobytes() for line in np.packbits(rows, axis=1))
    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    content = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_grey_of_few_bits_is_scaled_in_each_mode_and_kept_in_masks(bits: int) -> None:
    most = 2**bits - 1
    numbers = RNG.integers(0, most + 1, (9, 7), np.uint8)
    data, scaled = grey_png(numbers, bits), numbers * np.uint8(255 // most)
    for mode in ("rgb", "grey", "keep"):
        found = presize(data, Recipe(size=(9, 7), mode=mode), "a")
        assert (found == scaled[..., None]).all()
    assert_array_equal(decode_mask(data, "a"), scaled if bits == 1 else numbers)


def test_a_ppm_of_16_bits_is_not_kept_as_8() -> None:
    data = b"P6 # a comment\n7 9\n65535\n" + DEEP.astype(">u2").tobytes()
    with pytest.raises(SampleError, match="colours of more than 8 bits as 8 bits"):
        presize(data, KEEP, "a")
    assert np.abs(presize(data, Recipe(size=(9, 7)), "a").astype(int) - np.rint(DEEP / 257)).max() <= 1


def bmp_of_greys(numbers: npt.NDArray[np.uint8], step: int) -> bytes:
    height, width = numbers.shape
    padded = np.zeros((height, -(-width // 8) * 8), np.uint8)
    padded[:, :width] = numbers[::-1]
    content = (padded[:, ::2] << 4 | padded[:, 1::2]).tobytes()
    palette = b"".join(bytes([level * step] * 3 + [0]) for level in range(16))
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 4, 0, len(content), 0, 0, 16, 0) + palette
    return struct.pack("<2sIII", b"BM", 14 + len(head) + len(content), 0, 14 + len(head)) + head + content


def bmp_of_alpha(pixels: npt.NDArray[np.uint8]) -> bytes:
    height, width = pixels.shape[:2]
    content = pixels[::-1, :, [2, 1, 0, 3]].tobytes()
    head = struct.pack("<IiiHHIIiiII", 108, width, height, 1, 32, 3, len(content), 0, 0, 0, 0)
    head += struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000) + b"BGRs" + bytes(48)
    return struct.pack("<2sIII", b"BM", 14 + len(head) + len(content), 0, 14 + len(head)) + head + content


@pytest.mark.parametrize("mode", ["rgb", "grey"])
def test_alpha_that_is_0_everywhere_hides_no_picture(mode: Any) -> None:
    recipe = Recipe(size=(9, 7), mode=mode)
    pixels = RNG.integers(0, 256, (9, 7, 4), np.uint8)
    pixels[..., 3] = 0
    opaque = presize(pixels[..., :3], recipe, "a")
    assert_array_equal(presize(bmp_of_alpha(pixels), recipe, "a"), opaque)
    for name in ("PNG", "TGA", "TIFF", "WEBP"):
        data = encode(pixels, name, **({"lossless": True, "exact": True} if name == "WEBP" else {}))
        with pytest.raises(SampleError, match="alpha is 0 everywhere"):
            presize(data, recipe, "a")
    with pytest.raises(SampleError, match="has 4 channels, and nothing says"):
        presize(pixels, recipe, "a")
    pixels[:] = 0
    assert (presize(encode(pixels), recipe, "a") == 255).all()
    pixels[0, 0] = 9, 9, 9, 255
    assert (presize(bmp_of_alpha(pixels), recipe, "a") == 255).mean() > 0.9


def test_a_deep_tiff_whose_zero_is_white_is_not_kept() -> None:
    data = tiff(DEEP[..., 0], {258: [16], 262: [0], 277: [1]})
    with pytest.raises(SampleError, match="0 is white in this TIFF"):
        presize(data, KEEP, "a")
